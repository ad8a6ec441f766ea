"""How the demo looks: a live picture on a terminal, plain lines elsewhere, and a table at the end.

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

from rayqueue.demo.story import Kill, Outcome, Story
from rayqueue.demo.traffic import RECORD_BYTES

_FRAME_S = 0.1
_LINE_S = 2.0
_WIDTH = 80
_TITLE = "RayQueue: one partition, three replicas, kill -9 on whichever leads"


def show(story: Story, console: Console) -> tuple[Outcome, RenderableType]:
    """Let the story happen. Returns what came of it, and a picture from its middle."""
    picture: RenderableType = Text()
    with _screen(story, console) as draw:
        story.begin()
        while story.tick():
            draw()
            if story.kills and len(story.kills) <= 2 and story.kills[-1].node not in story.statuses:
                picture = frame(story)
            time.sleep(_FRAME_S)
        story.read_copies()
        story.run_sprint()
        draw()
    return story.outcome(), picture


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
        Group(_bars(story), Text(), _replicas(story), Text(), _events(story)),
        title=_TITLE,
        title_align="left",
        width=_WIDTH,
        padding=(1, 2),
    )


def _bars(story: Story) -> Table:
    table = Table.grid(padding=(0, 2))
    total = story.plan.records
    counts = (
        ("written", story.writer.sent),
        ("acknowledged", story.writer.acknowledged),
        ("read and checked", story.reader.check.read),
    )
    for name, count in counts:
        bar = ProgressBar(total=total, completed=count, width=32, complete_style="green")
        table.add_row(name, bar, Text(f"{count:>9,} of {total:,}", style="bold"))
    return table


def _replicas(story: Story) -> Table:
    table = Table("replica", "role", "term", "high watermark", "", box=None, pad_edge=False, padding=(0, 3, 0, 0))
    killed = story.kills[-1] if story.kills and story.kills[-1].rejoined_s is None else None
    for node in story.group.nodes:
        status = story.statuses.get(node)
        note = Text()
        if killed is not None and killed.node == node:
            age_s = time.monotonic() - killed.at_s
            note = Text(f"kill -9, {age_s:.1f} s ago", style="red")
        if status is None:
            table.add_row(node, Text("gone", style="red"), "", "", note)
            continue
        style = "bold green" if status.role == "leader" else ""
        role = Text(status.role, style=style)
        table.add_row(Text(node, style=style), role, str(status.term), f"{status.high_watermark:,}", note)
    return table


def _events(story: Story) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for column in (f"{story.elapsed_s:.1f} s", "killed", "next leader", "writes paused", "back and whole after"):
        table.add_column(column, justify="left" if column in ("killed", "next leader") else "right")
    for kill in story.kills:
        table.add_row(f"{kill.at_s - story.started_s:.1f} s", f"{kill.node} of term {kill.term}", *_after(kill))
    for _ in range(story.plan.kills - len(story.kills)):
        table.add_row()
    return table


def _after(kill: Kill) -> tuple[str, str, str]:
    """What came of a kill, as far as that is known."""
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
        self._told: list[str] = []

    def draw(self) -> None:
        story = self._story
        for kill in story.kills:
            successor, paused, back = _after(kill)
            self._say_once(kill, f"killed {kill.node}, leader of term {kill.term}, pid {kill.pid}")
            if successor:
                self._say_once(kill, f"{successor} leads instead of {kill.node}")
            if back:
                self._say_once(kill, f"{kill.node} is back and whole after {back}; writes paused {paused}")
        if story.elapsed_s >= self._next_s:
            self._next_s = story.elapsed_s + _LINE_S
            leader = story.leader
            who = f"{leader.node_id} leads term {leader.term}" if leader else "nobody leads"
            counts = f"acknowledged {story.writer.acknowledged:,}, read {story.reader.check.read:,}"
            self._say(f"{counts} of {story.plan.records:,}; {who}")

    def _say_once(self, kill: Kill, text: str) -> None:
        key = f"{kill.at_s} {text}"
        if key not in self._told:
            self._told.append(key)
            self._say(text)

    def _say(self, text: str) -> None:
        self._console.print(f"{self._story.elapsed_s:5.1f} s   {text}", soft_wrap=True, highlight=False)


# -- the end -------------------------------------------------------------------------------------------


def verdict(outcome: Outcome) -> RenderableType:
    return Group(_proof(outcome), _kills(outcome), _copies(outcome), _sentence(outcome))


def _proof(outcome: Outcome) -> Table:
    table = Table(title="Records", title_justify="left", title_style="bold")
    for name in ("written", "acknowledged", "read", "lost", "duplicated", "out of order"):
        table.add_column(name, justify="right")
    wanted = outcome.plan.records
    table.add_row(
        f"{wanted:,}",
        _judged(outcome.acknowledged, wanted),
        _judged(outcome.read, wanted),
        _judged(outcome.lost, 0),
        _judged(outcome.duplicated, 0),
        _judged(outcome.out_of_order, 0),
    )
    return table


def _judged(found: int, wanted: int) -> Text:
    return Text(f"{found:,}", style="green" if found == wanted else "bold red")


def _kills(outcome: Outcome) -> Table:
    table = Table(title="Leaders killed while records were written", title_justify="left", title_style="bold")
    table.add_column("killed")
    table.add_column("next leader")
    table.add_column("writes paused", justify="right")
    table.add_column("back and whole after", justify="right")
    for kill in outcome.kills:
        table.add_row(f"{kill.node} of term {kill.term}", *_after(kill))
    return table


def _copies(outcome: Outcome) -> Table:
    table = Table(title="The log, read again from each replica", title_justify="left", title_style="bold")
    table.add_column("replica")
    table.add_column("records", justify="right")
    table.add_column("sha-256 of offsets and bytes")
    table.add_column("records/s", justify="right")
    for copy in outcome.copies:
        rate = copy.records / copy.seconds if copy.seconds else 0.0
        table.add_row(copy.node, _judged(copy.records, outcome.plan.records), copy.digest, f"{rate:,.0f}")
    return table


def _sentence(outcome: Outcome) -> Text:
    if not outcome.sound or outcome.sprint is None:
        return Text("This should not have happened: something is missing, doubled or out of order.", style="bold red")
    paused_ms = max((kill.pause_s or 0.0 for kill in outcome.kills), default=0.0) * 1000
    sprint = outcome.sprint
    return Text(
        f"All {outcome.acknowledged:,} records of {RECORD_BYTES} bytes are on every replica, once and in order.\n"
        f"Writes paused for {paused_ms:,.0f} ms at most.\n"
        f"At full speed, without kills, as many again took {sprint.seconds:.2f} s: "
        f"{sprint.records_per_s:,.0f} records/s.",
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
