"""The demo's view: a live picture on a terminal, plain lines elsewhere, and a table at the end.

Owns the words and the colours. It asks the story what to show, and drives it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rayqueue.demo.story import GROUP, TOPIC, Kill, Outcome, Story, leading_replica
from rayqueue.demo.traffic import RECORD_BYTES

_FRAME_S = 0.1
_LINE_S = 2.0
_WIDTH = 80
_TITLE = "RayQueue: a topic, a consumer group, kill -9 on whichever leads"


def show(story: Story, console: Console) -> tuple[Outcome, RenderableType]:
    """Let the story happen. Returns what came of it, and a picture from its middle."""
    picture: RenderableType = Text()
    with _screen(story, console) as draw:
        story.begin()
        while story.tick():
            draw()
            if story.kills and len(story.kills) <= 2 and story.kills[-1].rejoined_s is None:
                picture = frame(story)
            time.sleep(_FRAME_S)
        story.run_sprint()
        outcome = story.finish()
        draw()
    return outcome, picture


@contextmanager
def _screen(story: Story, console: Console) -> Iterator[Any]:
    if not console.is_terminal:
        lines = _Lines(story, console)
        yield lines.draw
        return
    with Live(frame(story), console=console, auto_refresh=False, redirect_stdout=False, transient=True) as live:
        yield lambda: live.update(frame(story), refresh=True)


# -- the live picture ---------------------------------------------------------------------------


def frame(story: Story) -> RenderableType:
    return Panel(
        Group(_bars(story), Text(), _partitions(story), Text(), _events(story)),
        title=_TITLE,
        title_align="left",
        width=_WIDTH,
        padding=(1, 2),
    )


def _bars(story: Story) -> Table:
    table = Table.grid(padding=(0, 2))
    total = story.plan.records
    rows = (
        (f"{story.plan.producers} producers", story.acknowledged, story.produce_rate.per_s),
        (f"{story.plan.consumers} consumers", story.read, story.consume_rate.per_s),
    )
    for name, count, per_s in rows:
        bar = ProgressBar(total=total, completed=count, width=24, complete_style="green")
        table.add_row(name, bar, Text(f"{count:>9,}", style="bold"), f"{per_s:>8,.0f} records/s")
    return table


def _partitions(story: Story) -> Table:
    columns = ("partition", "leader", "term", "high watermark", "lag", "consumer", "")
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    killed = story.kills[-1] if story.kills and story.kills[-1].rejoined_s is None else None
    for partition in story.topic.partitions:
        replica_id = leading_replica(partition)
        leader = Text(replica_id or "none", style="bold green" if replica_id else "red")
        readers = [
            f"consumer {member}" for member, told in story.consumed.items() if partition.number in told.partitions
        ]
        note = Text()
        if killed is not None and killed.partition == partition.number:
            note = Text(f"{killed.replica_id}: kill -9, {time.time() - killed.at_s:.1f} s ago", style="red")
        table.add_row(
            f"{TOPIC}-{partition.number}",
            leader,
            str(partition.term),
            f"{partition.end_offset:,}",
            f"{_lag(story, partition.number):,}",
            ", ".join(readers),
            note,
        )
    return table


def _lag(story: Story, number: int) -> int:
    if story.group is None:
        return 0
    return sum(each.lag for each in story.group.partitions if (each.topic, each.partition) == (TOPIC, number))


def _events(story: Story) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("killed", "next leader", "acks paused", "back and whole after"):
        table.add_column(column, justify="left" if column in ("killed", "next leader") else "right")
    for kill in story.kills:
        table.add_row(_victim(kill), *_after(kill))
    for _ in range(story.plan.kills - len(story.kills)):
        table.add_row()
    return table


def _victim(kill: Kill) -> str:
    return f"{kill.replica_id} of {TOPIC}-{kill.partition}, term {kill.term}"


def _after(kill: Kill) -> tuple[str, str, str]:
    """The consequence of a kill, as far as it is known."""
    return (
        kill.successor or "",
        "" if kill.pause_s is None else f"{kill.pause_s * 1000:,.0f} ms",
        "" if kill.rejoined_s is None else f"{kill.rejoined_s:.1f} s",
    )


# -- without a terminal -----------------------------------------------------------------------------


class _Lines:
    """One line every few seconds, and one for each thing that happens."""

    def __init__(self, story: Story, console: Console) -> None:
        self._story = story
        self._console = console
        self._next_s = 0.0
        self._told: set[str] = set()

    def draw(self) -> None:
        story = self._story
        for number, kill in enumerate(story.kills):
            successor, paused, back = _after(kill)
            self._say_once(number, f"killed {_victim(kill)}, pid {kill.pid}")
            if successor:
                self._say_once(number, f"{successor} leads {TOPIC}-{kill.partition} instead of {kill.replica_id}")
            if back:
                self._say_once(number, f"{kill.replica_id} is back and whole after {back}; acks paused {paused}")
        if story.elapsed_s >= self._next_s:
            self._next_s = story.elapsed_s + _LINE_S
            leaders = ", ".join(
                f"{leading_replica(each) or 'nobody'} leads {each.number}" for each in story.topic.partitions
            )
            counts = f"acknowledged {story.acknowledged:,}, read {story.read:,}"
            self._say(f"{counts} of {story.plan.records:,}; {leaders}")

    def _say_once(self, number: int, text: str) -> None:
        key = f"{number} {text}"
        if key not in self._told:
            self._told.add(key)
            self._say(text)

    def _say(self, text: str) -> None:
        self._console.print(f"{self._story.elapsed_s:5.1f} s   {text}", soft_wrap=True, highlight=False)


# -- the end -------------------------------------------------------------------------------------------


def verdict(outcome: Outcome) -> RenderableType:
    return Group(_proof(outcome), _kills(outcome), _sentence(outcome))


def _proof(outcome: Outcome) -> Table:
    table = Table(title="Records", title_justify="left", title_style="bold")
    wanted = outcome.plan.each * outcome.plan.producers
    columns = {
        "acknowledged": (outcome.acknowledged, wanted),
        "stored": (outcome.stored, wanted),
        "read": (outcome.read, wanted),
        "lost": (outcome.lost, 0),
        "duplicated": (outcome.duplicated, 0),
        "disordered": (outcome.out_of_order, 0),
        "lag": (outcome.lag, 0),
    }
    for name in columns:
        table.add_column(name, justify="right")
    table.add_row(*(_judged(*pair) for pair in columns.values()))
    return table


def _judged(found: int, wanted: int) -> Text:
    return Text(f"{found:,}", style="green" if found == wanted else "bold red")


def _kills(outcome: Outcome) -> Table:
    table = Table(title="Leaders killed on the way", title_justify="left", title_style="bold")
    table.add_column("killed")
    table.add_column("next leader")
    table.add_column("acks paused", justify="right")
    table.add_column("back and whole after", justify="right")
    for kill in outcome.kills:
        table.add_row(_victim(kill), *_after(kill))
    return table


def _sentence(outcome: Outcome) -> Text:
    if not outcome.sound or outcome.sprint is None:
        return Text("This should not have happened: something is missing, doubled or out of order.", style="bold red")
    paused_ms = max((kill.pause_s or 0.0 for kill in outcome.kills), default=0.0) * 1000
    sprint = outcome.sprint
    return Text(
        f"All {outcome.acknowledged:,} records of {RECORD_BYTES} bytes were read by {GROUP}, once and in order.\n"
        f"A partition's acknowledgements paused for {paused_ms:,.0f} ms at most.\n"
        f"At full speed, without kills: {sprint.records / sprint.produce_s:,.0f} records/s produced, "
        f"{sprint.records / sprint.consume_s:,.0f} consumed.",
        style="bold green",
    )


def save_svg(path: Path, picture: RenderableType, outcome: Outcome) -> None:
    """The picture and the tables, for the documentation."""
    with Path("/dev/null").open("w") as nowhere:
        console = Console(record=True, width=_WIDTH, file=nowhere, force_terminal=True, color_system="truecolor")
        console.print(picture)
        console.print(verdict(outcome))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(console.export_svg(title="rayqueue demo"))
