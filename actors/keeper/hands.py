"""The hands of the keeper, shared by its parts: tasks that run beside each other, and calls to what they change.

A step that fails is logged, and waits before it may be begun again. So does one
that has found nothing to do (it returns False): whenever a step ends the keeper
looks again, and a move that only waits for its learner would keep it looking.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import ray

from rayqueue.actors.keeper.plan import ReplicaKey
from rayqueue.actors.names import actor_name
from rayqueue.actors.ray_calls import FAILURES
from rayqueue.actors.replies import Reply

if TYPE_CHECKING:
    from rayqueue.cluster.commands import AnyCommand
    from rayqueue.replica.coordinator_service import CoordinatorReplica

_log = logging.getLogger(__name__)

_AFTER_FAILURE_S = 1.0
_AFTER_NOTHING_S = 0.25


class Hands:
    """Belongs to the event loop of its keeper, except ``wake``."""

    replica: CoordinatorReplica
    """Set before anything is asked."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._loop = asyncio.get_running_loop()
        self.woken = asyncio.Event()
        self.steps: dict[object, asyncio.Task[None]] = {}
        """What is being done, by its key."""

    def wake(self) -> None:
        """Look now. From any thread."""
        self._loop.call_soon_threadsafe(self.woken.set)

    def begin(self, key: object, work: Coroutine[Any, Any, bool | None]) -> None:
        """Do it beside everything else, once at a time."""
        if key in self.steps:
            work.close()
            return

        async def guarded() -> None:
            try:
                if await work is False:
                    await asyncio.sleep(_AFTER_NOTHING_S)
            except FAILURES as error:
                _log.warning("%s: %s", key, in_short(error))
                await asyncio.sleep(_AFTER_FAILURE_S)
            except Exception:  # noqa: BLE001  # a bug, which must neither be silent nor be met again without pause
                _log.exception("%s", key)
                await asyncio.sleep(_AFTER_FAILURE_S)
            finally:
                self.steps.pop(key, None)
                self.woken.set()

        self.steps[key] = self._loop.create_task(guarded())

    async def handle(self, key: ReplicaKey) -> Any:
        """The replica's actor. ``ValueError`` if it has none."""
        return await asyncio.to_thread(ray.get_actor, actor_name(*key), self._namespace)

    async def change(self, command: AnyCommand) -> Any:
        """What the coordinator's group answers to this command."""
        return await self.asked(lambda answer: self.replica.service.change(command, answer))

    async def asked(self, ask: Callable[[Callable[[Any], None]], None]) -> Any:
        reply = Reply()
        ask(reply)
        return await reply.future


def in_short(error: Exception) -> str:
    """Ray puts the text of an actor's error below its traceback."""
    return str(error).strip().splitlines()[-1] if str(error).strip() else repr(error)
