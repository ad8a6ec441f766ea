"""Fixtures that several files of unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.unit.raft.tcp_net import Net

# How long an example takes says something about the machine and what else runs on it, not about the code.
settings.register_profile("rayqueue", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("rayqueue")


@pytest.fixture
def net() -> Iterator[Net]:
    """Nodes with TCP transports; whatever is open after the test is closed."""
    net = Net()
    yield net
    for node in net.nodes:
        node.transport.close()
