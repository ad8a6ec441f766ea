"""Items of ``rayqueue.Queue``: any picklable thing, as bytes.

The one place where RayQueue pickles, and it does so in the client alone: no
replica ever opens an item. Whoever can put into such a queue can run code in
whoever gets from it, exactly as with ``ray.util.queue`` and Ray itself: both are
behind the same token.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import cloudpickle


def pickled(item: Any) -> bytes:
    """``ObjectRef``s inside of it stay valid: Ray keeps an object whose reference was pickled for as long as its owner
    lives, whoever else lets go of it."""
    return cloudpickle.dumps(item)  # type: ignore[no-untyped-call,no-any-return]


def unpickled(data: bytes | None) -> Any:
    return None if data is None else cloudpickle.loads(data)


def is_ref(item: Any) -> bool:
    """As with ``ray.util.queue``, an item that is itself an ``ObjectRef`` means the object."""
    return isinstance(item, ray.ObjectRef)
