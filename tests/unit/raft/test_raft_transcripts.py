"""The Raft engine against its transcripts: what replicas say to each event is what stands in the text.

A change that is meant: ``REWRITE_TRANSCRIPTS=1 pytest tests/unit/raft/test_raft_transcripts.py``, and review the text.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.unit.raft.transcript import Transcript

TEXTS = sorted((Path(__file__).parent / "transcripts").glob("*.txt"))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    text = path.read_text()
    played = Transcript().play(text)
    if os.environ.get("REWRITE_TRANSCRIPTS"):
        path.write_text(played)
    assert played == text


def test_there_are_some() -> None:
    assert len(TEXTS) >= 7
