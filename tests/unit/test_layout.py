"""The frame of the repository: symlinks, archives, and rules that really fire."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import rayqueue.actors
import rayqueue.client

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("actors", "client")

in_checkout = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")


def run(*command: str | Path, cwd: Path = ROOT, text: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, input=text, capture_output=True, text=True, timeout=100, check=False)


# -- symlinks -----------------------------------------------------------------------------------------------------


@in_checkout
@pytest.mark.parametrize("name", LINKED)
def test_symlink_is_committed_as_a_symlink(name: str) -> None:
    listed = run("git", "ls-files", "--stage", f"rayqueue/{name}").stdout.split()
    assert listed[0] == "120000"
    assert run("git", "cat-file", "blob", listed[1]).stdout == f"../{name}"


@pytest.mark.parametrize("name", LINKED)
def test_symlink_is_there(name: str) -> None:
    assert (ROOT / "rayqueue" / name).readlink() == Path("..", name)


def test_actors_and_client_import_under_their_one_name() -> None:
    for name, module in (("actors", rayqueue.actors), ("client", rayqueue.client)):
        assert module.__name__ == f"rayqueue.{name}"
        assert Path(str(module.__file__)).resolve() == ROOT / name / "__init__.py"


def test_importing_rayqueue_is_cheap() -> None:
    heavy = "{'ray', 'pyarrow', 'pydantic', 'lmdb', 'pysyncobj'}"
    done = run(sys.executable, "-c", f"import sys, rayqueue; print(*{heavy} & set(sys.modules))")
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


_COMMAND = """
import sys
from rayqueue.cli import app
sys.argv[1:] = {arguments!r}
try:
    app()
except SystemExit as exit:
    code = exit.code
heavy = {{"ray", "pyarrow", "numpy", "lmdb", "pysyncobj", "asyncio", "crc32c", "rich.progress"}}
print(code, *heavy & set(sys.modules), file=sys.stderr)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["topics", "create", "--help"], ["consume", "--help"]]
)
def test_what_a_command_does_not_need_it_does_not_import(arguments: list[str]) -> None:
    done = run(sys.executable, "-c", _COMMAND.format(arguments=arguments))
    assert (done.returncode, done.stderr.split()) == (0, ["0"]), done.stderr
    assert done.stdout.startswith(("rayqueue ", "Usage: "))


_CLIENT = """
import sys
import rayqueue.client.connect
import rayqueue.actors.coordinator_actor, rayqueue.actors.partition_actor, rayqueue.replica.status
parts = ("rayqueue.replica.", "rayqueue.raft", "rayqueue.partition", "rayqueue.cluster", "lmdb", "pysyncobj", "pyarrow")
print(*(name for name in sys.modules if name.startswith(parts) and name != "rayqueue.replica.status"))
"""


@pytest.mark.slow
def test_a_client_loads_no_replica() -> None:
    """Ray loads an actor's class wherever somebody gets a handle of it, and the classes of its answers."""
    done = run(sys.executable, "-c", _CLIENT)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr


# -- archives -----------------------------------------------------------------------------------------------------


def package_files(root: Path) -> set[str]:
    """What an archive must hold: every file of the package, below a symlink too."""
    found = set()
    for folder, subfolders, names in os.walk(root / "rayqueue", followlinks=True):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        found |= {str((Path(folder) / name).relative_to(root)) for name in names if not name.endswith(".pyc")}
    return found


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and wheel from the tree, and in ``again/`` the wheel from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    # A copy, so that a file which appears or disappears meanwhile does not matter.
    tree = tmp_path_factory.mktemp("tree") / "rayqueue"
    tree.mkdir()
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("rayqueue", *LINKED):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    build(tree, out, "sdist", "wheel")
    with tarfile.open(next(out.glob("*.tar.gz"))) as tar:
        tar.extractall(out / "unpacked", filter="data")
    build(next((out / "unpacked").iterdir()), out / "again", "wheel")
    (out / "expected").write_text("\n".join(sorted(package_files(tree))))
    return out


def build(tree: Path, out: Path, *targets: str) -> None:
    """By the installed build backend; no network."""
    chosen = [argument for target in targets for argument in ("-t", target)]
    done = run(sys.executable, "-m", "hatchling", "build", "-d", out, *chosen, cwd=tree)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("wheel_of", [".", "again"], ids=["tree", "sdist"])
def test_wheel_holds_real_files(archives: Path, wheel_of: str) -> None:
    with zipfile.ZipFile(next((archives / wheel_of).glob("*.whl"))) as wheel:
        names = {info.filename for info in wheel.infolist() if not info.filename.startswith("rayqueue-")}
        modes = [info.external_attr >> 16 for info in wheel.infolist()]
    assert names == set((archives / "expected").read_text().split("\n"))
    assert {f"rayqueue/{name}/__init__.py" for name in LINKED} <= names
    assert "rayqueue/py.typed" in names
    assert not any(stat.S_ISLNK(mode) for mode in modes)


@pytest.mark.slow
def test_sdist_holds_real_files(archives: Path) -> None:
    with tarfile.open(next(archives.glob("*.tar.gz"))) as tar:
        members = tar.getmembers()
    assert not any(member.issym() or member.islnk() for member in members)
    names = {member.name.partition("/")[2] for member in members}
    assert set((archives / "expected").read_text().split("\n")) <= names
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml"} <= names


@pytest.mark.slow
def test_wheel_imports_from_where_it_is_unpacked(archives: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(next(archives.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "import rayqueue.actors, rayqueue.client, rayqueue.config;"
        "print(rayqueue.actors.__file__, rayqueue.client.__file__)"
    )
    done = run(sys.executable, "-I", "-c", code, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "rayqueue" / name / "__init__.py") for name in LINKED]


# -- rules --------------------------------------------------------------------------------------------------------


def banned(line: str, file: str) -> bool:
    command = (sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "TID251", "--stdin-filename", file, "-")
    done = run(*command, text=f"{line}\n")
    assert done.returncode in (0, 1), done.stderr
    return "TID251" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("file", ["rayqueue/x.py", "actors/x.py", "client/x.py", "tests/unit/x.py", "benchmarks/x.py"])
def test_ban_on_the_second_names_fires_everywhere(file: str) -> None:
    for name in LINKED:
        assert banned(f"import {name}", file)
    assert not banned("import rayqueue.actors", file)


@pytest.mark.parametrize(
    "line",
    ["from actors import x", "from actors.x import y", "import client.x", "import pickle", "from pickle import loads"],
)
def test_ban_fires_in_each_form(line: str) -> None:
    assert banned(line, "rayqueue/x.py")


@pytest.mark.parametrize("file", ["rayqueue/x.py", "actors/x.py", "client/x.py", "tests/unit/x.py"])
@pytest.mark.slow
def test_rays_insides_are_in_one_file(file: str) -> None:
    """By import, which ruff sees."""
    lines = [
        "import ray._private.worker",
        "from ray._raylet import GcsClient",
        "import ray\nray._private.state.actors()",
    ]
    for line in lines:
        assert banned(line, file)
        assert not banned(line, "actors/_ray.py")


@pytest.mark.slow
def test_nobody_reaches_for_rays_insides() -> None:
    """By the attributes of what Ray's public interface hands out, which ruff does not see."""
    private = re.compile(r"\bray\._[a-z]|\b(_actor_id|_actor_method|_raylet|global_worker|_global_node)\b")
    places = ("rayqueue", "actors", "client", "benchmarks", "examples")
    modules = [path for place in places for path in (ROOT / place).rglob("*.py") if path.name != "_ray.py"]
    assert len(modules) > 150
    assert not [str(path) for path in modules if private.search(path.read_text())]


@pytest.mark.slow
def test_import_rules_fire(tmp_path: Path) -> None:
    """Break each rule in a copy, and see that each is reported."""
    shutil.copytree(ROOT / "rayqueue", tmp_path / "rayqueue", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    offences = {
        "rayqueue/partition/bad_clock.py": "import time",
        "rayqueue/raft/bad_socket.py": "from socket import socket",
        "rayqueue/records/bad_dice.py": "def roll():\n    import random",
        "rayqueue/bad_ray.py": "import ray",
        "rayqueue/raft/bad_engine.py": "import pysyncobj.journal",
        "rayqueue/bad_pickle.py": "import pickle",
        "rayqueue/partition/bad_transport.py": "import rayqueue.raft.tcp",
        "rayqueue/log/bad_layer.py": "import rayqueue.partition",
    }
    for path, line in offences.items():
        (tmp_path / path).write_text(f"{line}\n")
    done = run(Path(sys.executable).with_name("lint-imports"), "--no-cache", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    report = done.stdout.partition("Broken contracts")[2]
    for path in offences:
        module = path.removesuffix(".py").replace("/", ".")
        assert f"{module} -> " in report


# -- prose --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_module_says_what_it_is_by_a_noun() -> None:
    """A docstring that begins with a question word is a riddle."""
    riddles = {"What", "Who", "Where", "How", "When", "Which", "Why", "Whose"}
    places = ("rayqueue", "actors", "client", "tests", "benchmarks")
    found = [
        str(path.relative_to(ROOT))
        for place in places
        for path in (ROOT / place).rglob("*.py")
        if (text := ast.get_docstring(ast.parse(path.read_text()))) and text.split()[0] in riddles
    ]
    assert not found


def test_the_walks_of_the_architecture_page_can_be_followed() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    walks = re.findall(r"^From .*?, (\d+) steps through (\d+) files:\n\n(.*?)\n\n", page, re.MULTILINE | re.DOTALL)
    assert len(walks) == 2
    for count, files, table in walks:
        steps = re.findall(r"^\|.*?\| `([\w.]+)` \| `([\w.]+)` \|", table, re.MULTILINE)
        for module, name in steps:
            found = importlib.import_module(f"rayqueue.{module}")
            for part in name.split("."):
                found = getattr(found, part)
            assert callable(found), (module, name)
        assert (len(steps), len({module for module, _ in steps})) == (int(count), int(files))
