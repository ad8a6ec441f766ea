"""The census: which Ray nodes are there, which broker each of them is, and which are about to leave.

Part of the keeper. Asks Ray at each look, and each new node once, by a step of
its own. What it knows is true whoever leads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable, Mapping

from pydantic import SecretStr

from rayqueue.actors.keeper import nodes
from rayqueue.actors.keeper.hands import Hands
from rayqueue.actors.keeper.home import ClusterManifest, Home, same_broker
from rayqueue.actors.keeper.nodes import RayNode
from rayqueue.cluster.catalog import BrokerRow
from rayqueue.config import Settings
from rayqueue.errors import NoBrokerError, RayQueueError, StoreIdentityError
from rayqueue.net.requests import in_time

_log = logging.getLogger(__name__)

_IDENTIFY_S = 30.0
_FIRST_LOOK_S = 10.0
_HURRY_S = 30.0
"""How long leaders are looked for more often once Ray drains a node."""


class Census:
    """Belongs to the event loop of its keeper."""

    def __init__(self, hands: Hands, settings: Settings) -> None:
        self._hands = hands
        self._settings = settings
        self.homes: dict[str, Home] = {}
        """By Ray node."""
        self.strangers: set[str] = set()
        """Ray nodes whose data belongs to another cluster."""
        self.racks: dict[str, str] = {}
        """Of every Ray node that is there."""
        self.leaving: set[str] = set()
        """Ray nodes that Ray drains."""
        self.current: dict[str, str] = {}
        """Brokers, and the Ray node that each is on."""
        self._asked_since_s: dict[object, float] = {}
        self._told_shared: set[str] = set()
        self._hurry_until_s = float("-inf")

    def note(self, home: Home) -> None:
        """Somebody knows it already."""
        self.homes[home.ray_node] = home
        self.current[home.broker] = home.ray_node

    def home_of(self, broker: str) -> Home:
        """Where it is now, which the next await may change. ``NoBrokerError`` if it is not here."""
        home = self.homes.get(self.current.get(broker, ""))
        if home is None:
            raise NoBrokerError(f"broker {broker} is gone; retry when it is back", broker=broker)
        return home

    def expects(self, steps: Collection[object]) -> bool:
        """Whether one of these steps asks a node that has not been asked for long."""
        now_s = time.monotonic()
        return any(now_s - self._asked_since_s.get(key, float("-inf")) < _FIRST_LOOK_S for key in steps)

    @property
    def hurries(self) -> bool:
        """Ray drains a node since a moment ago."""
        return time.monotonic() < self._hurry_until_s

    async def look(self, rows: Iterable[BrokerRow], manifest: ClusterManifest) -> None:
        """Learn who the new ones are; forget those that are gone. ``rows``: what the metadata knows."""
        for row in rows:
            # Another coordinator has asked it. A Ray node's id is never used again.
            home = Home(row.broker, row.host, row.ray_node, 0, manifest, None, row.memory_bytes, row.directory)
            self.homes.setdefault(row.ray_node, home)
        alive = {node.node_id: node for node in await asyncio.to_thread(nodes.alive_nodes)}
        for node_id in self.homes.keys() - alive.keys():
            home = self.homes.pop(node_id)
            if self.current.get(home.broker) == node_id:
                _log.info("broker %s is gone with Ray node %s", home.broker, node_id)
        self.strangers &= alive.keys()
        self.racks = {node_id: node.rack for node_id, node in alive.items()}
        leaving = {node_id for node_id, node in alive.items() if node.leaving}
        if leaving - self.leaving:
            self._hurry_until_s = time.monotonic() + _HURRY_S
        self.leaving = leaving
        self._asked_since_s = {node: since for node, since in self._asked_since_s.items() if node in alive}
        for node_id, node in alive.items():
            if node_id not in self.homes and node_id not in self.strangers:
                self._asked_since_s.setdefault(node_id, time.monotonic())
                self._hands.begin(node_id, self._identify(node, manifest))
        self.current = await self._current_nodes(alive)

    async def _identify(self, node: RayNode, manifest: ClusterManifest) -> None:
        secret = self._settings.transport.secret or SecretStr("")
        ref = await asyncio.to_thread(nodes.join_at, node, self._settings.data_dir, manifest, secret)
        home: Home | RayQueueError = await in_time(ref, _IDENTIFY_S)
        if isinstance(home, StoreIdentityError):
            _log.error("Ray node %s is no broker here: %s", node.node_id, home)
            self.strangers.add(node.node_id)
            return
        if isinstance(home, RayQueueError):
            raise home
        _log.info("broker %s is on Ray node %s at %s", home.broker, home.ray_node, home.host)
        self.homes[node.node_id] = home

    async def _current_nodes(self, alive: Mapping[str, RayNode]) -> dict[str, str]:
        """Of two nodes that are the same broker, the one that was there first, as long as it really is there.

        Ray notices a dead node late: its successor, on the same disk, may be here before.
        """
        found: dict[str, list[str]] = {}
        for node_id, home in self.homes.items():
            if node_id in alive:  # one that died while it was asked who it is may have been noted since
                found.setdefault(home.broker, []).append(node_id)
        current: dict[str, str] = {}
        for broker, candidates in found.items():
            before = self.current.get(broker)
            if before in candidates:
                candidates.remove(before)
                candidates.insert(0, before)
            if len(candidates) > 1:
                answering = [each for each in candidates if await asyncio.to_thread(nodes.answers, alive[each])]
                candidates = answering or candidates
            current[broker] = candidates[0]
            for idle in set(candidates[1:]) - self._told_shared:
                self._told_shared.add(idle)
                _log.warning("%s", same_broker(broker, candidates[0], idle))
        return current
