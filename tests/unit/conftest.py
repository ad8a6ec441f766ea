"""Fixtures that several files of unit tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.tcp_net import Net


@pytest.fixture
def net() -> Iterator[Net]:
    """Nodes with TCP transports; whatever is open after the test is closed."""
    net = Net()
    yield net
    for node in net.nodes:
        node.transport.close()
