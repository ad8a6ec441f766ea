"""The sources of settings: arguments, environment, file, each read into flat dotted keys.

Adds what pydantic-settings does not tell: which variable or file set a value,
and which keys nobody knows. Knows the shape of the settings (sections and their keys), nothing of their meaning.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeAlias

import yaml
from pydantic import BaseModel
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsError

from rayqueue.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "RAYQUEUE_"
ENV_DELIMITER = "__"
CONFIG_PATH_VARIABLE = "RAYQUEUE_CONFIG_PATH"
FILE_NAMES = ("rayqueue.toml", "rayqueue.yaml", "rayqueue.yml")

Shape: TypeAlias = dict[str, "frozenset[str] | None"]
"""Section -> its keys; a plain setting -> None."""


@dataclass(frozen=True, slots=True)
class Problem:
    key: str
    source: str
    text: str

    def __str__(self) -> str:
        return f"{self.key} ({self.source}): {self.text}"


@dataclass(frozen=True, slots=True)
class Layer:
    """The values of one source, by dotted key, and its mistakes."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def shape_of(settings: type[BaseModel]) -> Shape:
    return {name: _keys(info.annotation) for name, info in settings.model_fields.items()}


def _keys(annotation: Any) -> frozenset[str] | None:
    is_section = isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return frozenset(annotation.model_fields) if is_section else None


def from_arguments(shape: Shape, arguments: Mapping[str, Any]) -> Layer:
    layer = Layer()
    _read(layer, shape, arguments, {}, "argument")
    return layer


def from_environment(settings: type[BaseSettings], shape: Shape) -> Layer:
    layer = Layer()
    variables = dict(_variables())
    known = {*_all_keys(shape), *shape}
    for key, variable in variables.items():
        if key not in known:
            layer.problems.append(unknown(shape, key, variable))
    try:
        values = EnvSettingsSource(settings)()
    except SettingsError as error:
        # A whole section may be given as JSON; nothing else in the environment has a syntax that can be wrong.
        section = {key: name for key, name in variables.items() if shape.get(key)}
        text = f"is not JSON: {error.__cause__ or error}"
        layer.problems.append(Problem(", ".join(section), ", ".join(section.values()), text))
        return layer
    _read(layer, shape, values, variables, "environment")
    return layer


def _variables() -> Iterator[tuple[str, str]]:
    """The key that each of our variables sets, and the variable as it is spelled."""
    for name, value in os.environ.items():
        upper = name.upper()
        if value and upper.startswith(ENV_PREFIX) and upper != CONFIG_PATH_VARIABLE:
            yield name[len(ENV_PREFIX) :].lower().replace(ENV_DELIMITER, "."), name


def from_file(shape: Shape, config_path: Path | None) -> Layer:
    layer = Layer()
    path = config_path or _find_file()
    if path is None:
        return layer
    _read(layer, shape, _parse(path), {}, str(path))
    return layer


def _find_file() -> Path | None:
    named = os.environ.get(CONFIG_PATH_VARIABLE)
    if named:
        return Path(named).expanduser()
    found = [Path(name) for name in FILE_NAMES if Path(name).exists()]
    if len(found) > 1:
        names = " and ".join(map(str, found))
        raise ConfigError(f"{names} are both here: keep one, or name one by {CONFIG_PATH_VARIABLE}", source=names)
    return found[0] if found else None


def _parse(path: Path) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        values: Any
        if path.suffix == ".toml":
            values = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            values = yaml.safe_load(text) or {}
        else:
            raise _unreadable(path, "its name must end in .toml, .yaml or .yml")
    except yaml.MarkedYAMLError as error:  # its own text quotes the line, which may hold a secret
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise _unreadable(path, f"{error.problem} (at line {line})") from None
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except (ValueError, yaml.YAMLError) as error:
        raise _unreadable(path, str(error)) from None
    if not isinstance(values, Mapping):
        raise _unreadable(path, "it must hold keys and values")
    return values


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"config_path ({path}): cannot be read: {why}", key="config_path", source=str(path))


def _read(layer: Layer, shape: Shape, values: Mapping[str, Any], variables: Mapping[str, str], source: str) -> None:
    """Flatten a source's values into ``layer``. ``variables``: the name of each key's variable, if it has one."""
    for dotted, value in _flattened(shape, values):
        where = variables.get(dotted) or variables.get(dotted.partition(".")[0]) or source
        section_keys = shape.get(dotted)
        if section_keys is not None:
            text = f"must be a section with some of the keys {_listed(section_keys)}"
            layer.problems.append(Problem(dotted, where, text))
        elif is_known(shape, dotted):
            layer.values[dotted] = value
            layer.sources[dotted] = where
        elif dotted not in variables:  # those were looked at before
            layer.problems.append(unknown(shape, dotted, where))


def _flattened(shape: Shape, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, BaseModel):
            yield from ((f"{name}.{key}", getattr(value, key)) for key in type(value).model_fields)
        elif isinstance(value, Mapping) and shape.get(name) is not None:
            yield from ((f"{name}.{key}", each) for key, each in value.items())
        else:
            yield str(name), value


def is_known(shape: Shape, dotted: str) -> bool:
    section, _, key = dotted.partition(".")
    keys = shape.get(section)
    return key in keys if keys is not None else section in shape and not key


def _all_keys(shape: Shape) -> Iterator[str]:
    for name, keys in shape.items():
        if keys is None:
            yield name
        else:
            yield from (f"{name}.{key}" for key in sorted(keys))


def unknown(shape: Shape, dotted: str, source: str) -> Problem:
    section, dot, _ = dotted.partition(".")
    keys = shape.get(section)
    near = get_close_matches(dotted, list(_all_keys(shape)), n=1, cutoff=0.8)
    hint = f"did you mean {near[0]}? " if near else ""
    if dot and keys is not None:
        return Problem(dotted, source, f"unknown key. {hint}{section} has {_listed(keys)}")
    return Problem(dotted, source, f"unknown key. {hint}There are {_listed(shape)}")


def _listed(names: Mapping[str, Any] | frozenset[str]) -> str:
    return ", ".join(sorted(names))
