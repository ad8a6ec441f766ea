"""Starting Spark with format "rayqueue": on this Ray by RayDP, or in this process.

``session(rq)`` tries RayDP first. If it cannot run (no shim for this Spark, no
room for executors, a start that takes too long), Spark is started in this
process instead, and says so: ``engine_of(spark)`` is "raydp" or "local", and the
reason is logged. With ``engine="raydp"`` it is an error instead.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from pyspark.sql import SparkSession

from rayqueue.bridge.connection import where
from rayqueue.client.handle import RayQueue
from rayqueue.errors import BridgeError, InvalidInputError, MissingDependencyError
from rayqueue.spark import raydp
from rayqueue.spark.needs import need_java, raydp_problem
from rayqueue.spark.source import source_for

_log = logging.getLogger(__name__)

Engine = Literal["auto", "raydp", "local"]

_OPENED = (
    *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.math", "java.net", "java.nio"),
    *("java.text", "java.util", "java.util.concurrent", "java.util.concurrent.atomic", "jdk.internal.ref"),
    *("sun.nio.ch", "sun.nio.cs", "sun.security.action", "sun.util.calendar"),
)
JAVA_OPTIONS = " ".join(
    ["-XX:+IgnoreUnrecognizedVMOptions", *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED)]
)
"""What Spark 4 and Ray's Java worker need of Java 17. Without java.math RayDP's master dies in the first conversion."""

_CHECKPOINTS = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"

_ENGINE = "spark.rayqueue.engine"
_REASON = "spark.rayqueue.reason"

_ATTEMPTS = 4
"""How often a task is tried: a replica that is killed in the middle of a scan costs one."""


@dataclass(frozen=True, slots=True)
class Spark:
    """Which engine runs, and why it is not RayDP if it is not."""

    engine: str
    reason: str


def session(
    rq: RayQueue,
    *,
    executors: int = 1,
    cores: int = 2,
    memory: str = "1g",
    engine: Engine = "auto",
    app_name: str = "rayqueue",
    configs: Mapping[str, str] | None = None,
    cpu_per_executor: float = 0.1,
    start_timeout_s: float = 120.0,
) -> SparkSession:
    """A Spark session that knows format "rayqueue", and this queue without being told where it is.

    ``executors`` x ``cores`` tasks run at a time, in actors of this Ray; each executor takes ``cpu_per_executor`` of
    Ray's CPUs, for executors that cannot be scheduled hang silently. End it with ``rayqueue.spark.stop(spark)``.

    ``MissingDependencyError`` if Java is not there.
    """
    if engine not in ("auto", "raydp", "local"):
        raise InvalidInputError(f"engine is auto, raydp or local, not {engine!r}", key="engine")
    need_java()
    _use_this_python()
    options = settings(configs)
    reason = "asked for"
    if engine != "local":
        problem = raydp_problem()
        if problem is None:
            try:
                spark = _raydp(app_name, executors, cores, memory, options, cpu_per_executor, start_timeout_s)
                return _ready(spark, rq, "raydp", "")
            except Exception as error:  # noqa: BLE001  # whatever goes wrong in there, Spark can still run here
                problem = f"{type(error).__name__}: {error}"
                with suppress(Exception):
                    raydp.stop()
        if engine == "raydp":
            kind = MissingDependencyError if "installed" in problem else BridgeError
            raise kind(f"Spark cannot run on this Ray: {problem}")
        reason = problem
        _log.warning("Spark runs in this process (local), not on Ray: %s", problem)
    return _ready(_local(app_name, executors * cores, options), rq, "local", reason)


def stop(spark: SparkSession) -> None:
    """End Spark and whatever was started for it."""
    if engine_of(spark).engine == "raydp":
        raydp.stop()
    else:
        spark.stop()


def engine_of(spark: SparkSession) -> Spark:
    """The engine that runs this session."""
    return Spark(spark.conf.get(_ENGINE, "unknown") or "unknown", spark.conf.get(_REASON, "") or "")


def register(spark: SparkSession, rq: RayQueue) -> None:
    """Teach any session format "rayqueue", with this queue as its default. Its workers must reach this Ray."""
    spark.dataSource.register(source_for(where(rq)))


def settings(configs: Mapping[str, str] | None = None) -> dict[str, str]:
    """The settings that a session needs for format "rayqueue", and ``configs`` over them."""
    return {
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
        "spark.executor.extraJavaOptions": JAVA_OPTIONS,
        "spark.pyspark.python": sys.executable,
        "spark.pyspark.driver.python": sys.executable,
        "spark.python.worker.reuse": "true",
        # A reader that takes filters is an error without this.
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "20000",
        # The usual one runs chmod in a process of its own for every file: a tenth of a second per micro-batch.
        "spark.sql.streaming.checkpointFileManagerClass": _CHECKPOINTS,
        "spark.sql.session.timeZone": "UTC",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "4",
        **(configs or {}),
    }


def _use_this_python() -> None:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)


def _raydp(
    app_name: str,
    executors: int,
    cores: int,
    memory: str,
    options: dict[str, str],
    cpu_per_executor: float,
    timeout_s: float,
) -> SparkSession:
    return raydp.start(
        app_name,
        executors=executors,
        cores=cores,
        memory=memory,
        configs=options,
        java_options=JAVA_OPTIONS,
        cpu_per_executor=cpu_per_executor,
        timeout_s=timeout_s,
    )


def _local(app_name: str, cores: int, options: Mapping[str, str]) -> SparkSession:
    # Without the second number a failed task fails the job.
    builder: Any = SparkSession.builder.master(f"local[{cores},{_ATTEMPTS}]").appName(app_name)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    local = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", **options}
    for key, value in local.items():
        builder = builder.config(key, value)
    spark: SparkSession = builder.getOrCreate()
    return spark


def _ready(spark: SparkSession, rq: RayQueue, engine: str, reason: str) -> SparkSession:
    spark.sparkContext.setLogLevel("ERROR")
    spark.conf.set(_ENGINE, engine)
    spark.conf.set(_REASON, reason)
    register(spark, rq)
    return spark
