"""From the command to the story: a Ray of its own, a queue on it, and nothing left behind."""

from __future__ import annotations

import io
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path

from rich.console import Console

from rayqueue.client.connect import connect
from rayqueue.client.embedded import embedded_ray
from rayqueue.demo.story import TOPIC, Outcome, Plan, Story
from rayqueue.demo.view import save_svg, show, verdict
from rayqueue.errors import InvalidInputError


def run(plan: Plan, *, data_dir: Path | None = None, svg: Path | None = None, quiet: bool = False) -> Outcome:
    """The whole demo, shown on the terminal unless ``quiet``."""
    console = Console(file=sys.stdout, quiet=quiet, highlight=False)
    with _home(data_dir) as home, _ray_is_silent(), console.status("") as doing, ExitStack() as cleanup:
        doing.update("starting Ray on this machine")
        cleanup.enter_context(embedded_ray())
        doing.update("starting RayQueue")
        rq = connect(data_dir=home)
        cleanup.callback(rq.shutdown)
        doing.update(f"creating a topic of {plan.partitions} partitions, three replicas each")
        rq.create_topic(TOPIC, partitions=plan.partitions, replication=3)
        story = Story(rq, plan, rq.topic(TOPIC))
        doing.stop()
        outcome, picture = show(story, console)
        console.print(verdict(outcome))
        if svg is not None:
            save_svg(svg, picture, outcome)
    return outcome


@contextmanager
def _home(data_dir: Path | None) -> Iterator[Path]:
    if data_dir is not None:
        if data_dir.is_dir() and any(data_dir.iterdir()):  # a queue's data, on which nobody wants leaders killed
            raise InvalidInputError(
                f"{data_dir} is not empty, and the demo begins with a new queue: name another directory, or delete "
                f"this one if it is an earlier demo's. `rayqueue up --data-dir {data_dir}` opens what is in it",
                path=str(data_dir),
            )
        yield data_dir
        return
    with tempfile.TemporaryDirectory(prefix="rayqueue-demo-") as temporary:
        yield Path(temporary)


class _Nowhere(io.TextIOBase):
    """Swallows what is written. Never closed: Ray keeps it, and uses it until the process ends."""

    def write(self, text: str) -> int:
        return len(text)


@contextmanager
def _ray_is_silent() -> Iterator[None]:
    """Ray prints a paragraph about each process that dies. Here that is what is meant to happen."""
    with redirect_stdout(_Nowhere()):
        yield
