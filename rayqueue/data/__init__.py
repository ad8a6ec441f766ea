"""Topics as Ray Datasets.

    ds = rayqueue.data.read_topic(rq, "orders")
    ds.write_datasink(rayqueue.data.TopicSink(rq, "results"))

    for part in rayqueue.data.follow_topic(rq, "orders", checkpoint="nightly"):
        part.dataset.write_parquet(...)
        part.commit()

``source.py`` reads ranges of offsets in tasks beside the replicas, ``follow.py``
goes on where the last run ended, ``sink.py`` writes what a whole job has made, or nothing.

Importing this package does not load Ray Data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rayqueue.data.follow import Part, follow_topic
    from rayqueue.data.sink import TopicSink
    from rayqueue.data.source import TopicDatasource, read_topic

_HOMES = {
    "read_topic": "source",
    "TopicDatasource": "source",
    "follow_topic": "follow",
    "Part": "follow",
    "TopicSink": "sink",
}

__all__ = ["Part", "TopicDatasource", "TopicSink", "follow_topic", "read_topic"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module
    from importlib.util import find_spec

    if find_spec("pandas") is None:
        from rayqueue.errors import MissingDependencyError

        raise MissingDependencyError("Ray Data needs pandas: pip install 'ray[data]'", package="ray[data]")
    return getattr(import_module(f"rayqueue.data.{home}"), name)
