"""All contact with RayDP.

RayDP has few maintainers, uses private names of Ray, and breaks with each minor
release of Spark until a shim for it ships. So nothing else imports it, and
what it cannot do is found out before it hangs.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rayqueue.client.joining import shown_token
from rayqueue.errors import BridgeError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MASTER_CPU = "spark.ray.raydp_spark_master.actor.resource.CPU"
_EXECUTOR_CPU = "spark.ray.raydp_spark_executor.actor.resource.cpu"
_APP_MASTER_OPTIONS = "spark.ray.raydp_app_master.extraJavaOptions"
_POLL_S = 0.2


def missing_shim() -> str | None:
    """Why this RayDP cannot run this Spark, or None. Without a shim the first job hangs."""
    from importlib.metadata import version

    found = importlib.util.find_spec("raydp")
    if found is None or found.origin is None:
        return "raydp is not installed: pip install 'rayqueue[spark]'"
    spark = version("pyspark")
    major, minor, *_ = spark.split(".")
    if not list(Path(found.origin).with_name("jars").glob(f"raydp-shims-spark{major}{minor}0-*.jar")):
        return f"raydp {version('raydp')} has no shim for Spark {spark}"
    return None


def start(
    app_name: str,
    *,
    executors: int,
    cores: int,
    memory: str,
    configs: Mapping[str, str],
    java_options: str,
    cpu_per_executor: float,
    timeout_s: float,
) -> SparkSession:
    """Spark in actors of this Ray. ``BridgeError`` if its executors are not there in time."""
    import raydp

    _look_for_room(executors, cpu_per_executor)
    own = {
        _MASTER_CPU: "0",
        _EXECUTOR_CPU: str(cpu_per_executor),
        _APP_MASTER_OPTIONS: java_options,
    }
    deadline_s = time.monotonic() + timeout_s
    with shown_token():  # its JVM joins this Ray too
        spark: SparkSession = raydp.init_spark(
            app_name,
            num_executors=executors,
            executor_cores=cores,
            executor_memory=memory,
            configs={**configs, **own},
        )
    try:
        _wait_for_executors(spark, executors, deadline_s)
    except BaseException:
        stop()
        raise
    return spark


def stop() -> None:
    """End Spark and its actors."""
    import raydp

    raydp.stop_spark()


def _look_for_room(executors: int, cpu_per_executor: float) -> None:
    """Executors that cannot be scheduled wait for ever and say nothing."""
    import ray

    free = ray.available_resources().get("CPU", 0.0)  # type: ignore[no-untyped-call]
    needed = executors * cpu_per_executor
    if free + 1e-6 < needed:
        raise BridgeError(
            f"{executors} Spark executors need {needed:g} CPUs of Ray, of which {free:g} are free", needed=needed
        )


def _wait_for_executors(spark: SparkSession, wanted: int, deadline_s: float) -> None:
    scheduler = spark.sparkContext._jsc.sc()
    while True:
        there = scheduler.getExecutorMemoryStatus().size() - 1  # one of them is the driver
        if there >= wanted:
            return
        if time.monotonic() > deadline_s:
            raise BridgeError(f"{there} of {wanted} Spark executors came in time", executors=there)
        time.sleep(_POLL_S)
