"""The writer's window against its transcripts: what it does about each event is what stands in the text.

A change that is meant: ``REWRITE_TRANSCRIPTS=1 pytest tests/unit/net/test_write_transcripts.py``, and review the text.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.net.transcript import Transcript

TEXTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    text = path.read_text()
    transcript = Transcript()
    played = transcript.play(text)
    if os.environ.get("REWRITE_TRANSCRIPTS"):
        path.write_text(played)
    assert played == text
    assert len(transcript.resolved) == len(set(transcript.resolved)), "an outcome is told once"


def test_there_are_some() -> None:
    assert len(TEXTS) >= 8
