"""Spark for tests: skipped, with the reason, where it cannot run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from rayqueue.client.handle import RayQueue
from rayqueue.errors import MissingDependencyError


def need_java() -> None:
    """Skip the test unless Spark can be started here."""
    from rayqueue.spark import needs

    try:
        needs.need_java()
    except MissingDependencyError as error:
        pytest.skip(str(error))


@contextlib.contextmanager
def local_spark(rq: RayQueue) -> Iterator[Any]:
    """A session in this process, as small as it gets."""
    import rayqueue.spark

    configs = {"spark.sql.shuffle.partitions": "2", "spark.driver.memory": "1g"}
    spark = rayqueue.spark.session(rq, executors=1, cores=2, engine="local", configs=configs)
    try:
        yield spark
    finally:
        rayqueue.spark.stop(spark)
