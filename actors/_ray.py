"""Ray's insides under public names: the only file that knows them.

Ray's public interface says neither on which node an actor runs, nor which
cluster this machine has, nor how a process authenticates. What its private
modules are used for is here, and nowhere else (ruff bans the imports, a test
the attributes).

Those names are nobody's promise. So the version is checked at import, and so
is every name used here: a release that renames one is refused, not
misunderstood.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import ray
from ray import _raylet
from ray._private import ray_constants, services, state, utils, worker
from ray._private.authentication import authentication_token_setup
from ray.actor import ActorHandle
from ray.exceptions import AuthenticationError, RpcError

WRITTEN_FOR = "2.60"

_USED: dict[ModuleType | type[Any], tuple[str, ...]] = {
    _raylet: (
        "AuthenticationMode",
        "AuthenticationTokenLoader",
        "Config",
        "GcsClient",
        "InnerGcsClient",
        "get_authentication_mode",
        "setproctitle",
    ),
    authentication_token_setup: ("maybe_enable_token_auth_if_token_available",),
    ray_constants: ("ENABLE_RAY_CLUSTER",),
    services: ("canonicalize_bootstrap_address",),
    state: ("actors", "state"),
    utils: ("read_ray_address",),
    worker: ("global_worker", "_global_node"),
    ActorHandle: ("_actor_id",),
}


def check(version: str = ray.__version__) -> None:
    """``ImportError`` unless this is the Ray that this module knows."""
    if not version.startswith(f"{WRITTEN_FOR}."):
        raise ImportError(f"rayqueue was written for ray {WRITTEN_FOR}, found {version}. Install ray=={WRITTEN_FOR}.*")
    for owner, names in _USED.items():
        for name in names:
            if not hasattr(owner, name):
                raise ImportError(f"ray {version} has no {owner.__name__}.{name}; it is not the release rayqueue knows")


check()

_log = logging.getLogger(__name__)
_native: Any = _raylet
"""Without Ray's annotations, which do not know what its extension module has."""
if not hasattr(_native.InnerGcsClient, "get_draining_nodes"):
    raise ImportError(
        f"ray {ray.__version__} has no GcsClient.get_draining_nodes; it is not the release rayqueue knows"
    )


# -- clusters ---------------------------------------------------------------------------------


def running_address() -> str | None:
    """Of the Ray that ``ray start`` has started on this machine, or of one that was killed."""
    return utils.read_ray_address()


def canonical_address(address: str | None) -> str | None:
    """As Ray will call it: loopback becomes the machine's other address."""
    try:
        return services.canonicalize_bootstrap_address(address)  # type: ignore[arg-type]
    except (ConnectionError, ValueError):
        return address


@contextlib.contextmanager
def one_machine() -> Iterator[None]:
    """In this block Ray believes, as on macOS and Windows, that it cannot have other nodes, and binds to loopback."""
    multi_node = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = multi_node


# -- tokens -----------------------------------------------------------------------------------


def lets_in(address: str) -> bool:
    """False at once if that Ray asks for a token, or for another one; ``ray.init`` would try for 20 s."""
    if address.startswith("ray://"):
        return True
    try:
        _native.GcsClient(address=address)
    except AuthenticationError:
        return False
    except RpcError as error:
        _log.info("the Ray at %s does not answer: %s", address, error)  # ray.init finds out why
    return True


def asks_for_token() -> bool:
    """Whether this process authenticates by token."""
    return bool(_native.get_authentication_mode() == _native.AuthenticationMode.TOKEN)


def show_token() -> None:
    """From here on this process has the token of ~/.ray, and asks for it. Only for a Ray that does, too: on another one
    the calls of its processes would be refused here.

    ``ray.init`` takes the token by itself for a Ray that it starts, not for one that it joins.
    """
    logging.getLogger(authentication_token_setup.__name__).setLevel(logging.ERROR)
    authentication_token_setup.maybe_enable_token_auth_if_token_available(warn_if_disabled=False)


def forget_token_mode() -> None:
    """Authenticate as the environment says, and no more as the Ray did that this process was connected with.

    Ray keeps the mode for as long as the process lives. In token mode a process also refuses calls without a token: on
    a Ray that has none it would lose its actors and objects. Only while this process is connected with no Ray.
    """
    if not ray.is_initialized():
        _native.Config.initialize("")
        # A token that it remembers is asked for, whatever the mode.
        _native.AuthenticationTokenLoader.instance().reset_cache()


# -- processes --------------------------------------------------------------------------------


def pinned_to(handle: Any) -> str | None:
    """The Ray node of an actor, which does not change as long as it lives. None while it is not placed yet."""
    # Ray tells this nowhere else without its dashboard, except by asking the actor, which may hang with its node.
    told = state.actors(handle._actor_id.hex())
    if not told or told["State"] not in ("ALIVE", "RESTARTING"):
        return None
    return told["Address"]["NodeID"] or None


def draining_nodes() -> frozenset[str]:
    """The Ray nodes that Ray drains. Takes a second at most; nobody, if Ray does not say."""
    try:
        client: Any = vars(worker.global_worker)["gcs_client"]
        return frozenset(client.get_draining_nodes(timeout=1))
    except (KeyError, RpcError):
        return frozenset()


def set_process_title(title: str) -> None:
    """Until the next call of this process begins."""
    _native.setproctitle(title)


def keep_forever() -> None:
    """Ray's objects in this process are never collected: in a forked child their ends would wait for threads that it
    does not have, or crash."""
    for kept in (worker.global_worker, worker._global_node, state.state):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
