"""Settings: which source wins, what is refused, and what the refusal says."""

from __future__ import annotations

import os
import pickle  # noqa: TID251  (Ray does)
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr

from rayqueue.config import (
    CallSettings,
    ClientSettings,
    ClusterSettings,
    ConsumerSettings,
    GatewaySettings,
    LogSettings,
    ProducerSettings,
    RaftSettings,
    Section,
    Settings,
    TransportSettings,
    descriptions,
    effective,
)
from rayqueue.errors import ConfigError

MIB = 1024 * 1024
SECRET = "correct horse battery staple"


@pytest.fixture(autouse=True)
def _clean_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file and no variable of this machine reaches a test."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.upper().startswith("RAYQUEUE_")]:
        monkeypatch.delenv(name)


def refusal(**arguments: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Settings(**arguments)
    # A secret must not come back by the traceback of the error that was translated.
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    return caught.value


def sources(settings: Settings) -> dict[str, str]:
    return {row.key: row.source for row in effective(settings)}


# -- defaults -----------------------------------------------------------------------------------------------------


def test_defaults_are_the_measured_ones() -> None:
    settings = Settings()
    assert settings.raft == RaftSettings(
        election_timeout_min_ms=1000,
        election_timeout_max_ms=2500,
        heartbeat_ms=100,
        leader_fallback_ms=2000,
        fast_election_max_ms=150,
        append_batch_bytes=4 * MIB,
        window_bytes=16 * MIB,
        max_uncommitted_bytes=64 * MIB,
    )
    assert settings.log.max_batch_bytes == MIB
    assert settings.log.segment_bytes == 64 * MIB
    assert settings.log.cache_bytes == 32 * MIB
    assert settings.log.retention_ms is None
    assert settings.log.retention_bytes is None
    assert settings.transport.secret is None
    assert set(sources(settings).values()) == {"default"}


def test_settings_are_frozen() -> None:
    settings = Settings()
    with pytest.raises(Exception, match="frozen"):
        settings.namespace = "other"
    with pytest.raises(Exception, match="frozen"):
        settings.raft.heartbeat_ms = 1


def test_paths_are_absolute_because_workers_run_elsewhere(tmp_path: Path) -> None:
    assert Settings(data_dir="here").data_dir == tmp_path / "here"
    assert Settings(data_dir="~/there").data_dir == Path.home() / "there"
    assert Settings().data_dir.is_absolute()


# -- precedence ---------------------------------------------------------------------------------------------------


def write_toml(text: str, name: str = "rayqueue.toml") -> Path:
    path = Path(name)
    path.write_text(text, encoding="utf-8")
    return path


def test_argument_over_environment_over_file_over_default(monkeypatch: pytest.MonkeyPatch) -> None:
    write_toml("[raft]\nheartbeat_ms = 80\nsnapshot_retry_ms = 10\nleader_fallback_ms = 3000\n")
    monkeypatch.setenv("RAYQUEUE_RAFT__HEARTBEAT_MS", "70")
    monkeypatch.setenv("RAYQUEUE_RAFT__SNAPSHOT_RETRY_MS", "9")
    settings = Settings(raft={"heartbeat_ms": 60})
    assert settings.raft.heartbeat_ms == 60
    assert settings.raft.snapshot_retry_ms == 9
    assert settings.raft.leader_fallback_ms == 3000
    assert settings.raft.election_timeout_min_ms == 1000
    told = sources(settings)
    assert told["raft.heartbeat_ms"] == "argument"
    assert told["raft.snapshot_retry_ms"] == "RAYQUEUE_RAFT__SNAPSHOT_RETRY_MS"
    assert told["raft.leader_fallback_ms"] == "rayqueue.toml"
    assert told["raft.election_timeout_min_ms"] == "default"


def test_a_whole_section_in_one_source_does_not_hide_the_same_section_in_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_toml("[log]\nretention_ms = 5\nretention_bytes = 6\n")
    monkeypatch.setenv("RAYQUEUE_LOG", '{"retention_bytes": 7}')
    settings = Settings()
    assert (settings.log.retention_ms, settings.log.retention_bytes) == (5, 7)
    assert sources(settings)["log.retention_bytes"] == "RAYQUEUE_LOG"


@pytest.mark.parametrize("name", ["rayqueue.yaml", "rayqueue.yml"])
def test_yaml(name: str) -> None:
    Path(name).write_text("namespace: blue\nlog:\n  retention_ms: 5\n  retention_bytes: null\n")
    settings = Settings()
    assert (settings.namespace, settings.log.retention_ms, settings.log.retention_bytes) == ("blue", 5, None)
    assert sources(settings)["log.retention_ms"] == name


def test_an_empty_file_is_a_file() -> None:
    Path("rayqueue.yaml").write_text("")
    assert Settings().raft == RaftSettings()


def test_config_path_by_argument_over_variable_over_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_toml('namespace = "here"\n')
    assert Settings().namespace == "here"
    by_variable = write_toml('namespace = "variable"\n', "v.toml")
    monkeypatch.setenv("RAYQUEUE_CONFIG_PATH", str(by_variable))
    assert Settings().namespace == "variable"
    by_argument = write_toml('namespace = "argument"\n', "a.toml")
    settings = Settings(config_path=tmp_path / by_argument)
    assert settings.namespace == "argument"
    assert sources(settings)["namespace"] == str(tmp_path / by_argument)


def test_dotted_arguments() -> None:
    flags: dict[str, Any] = {"raft.heartbeat_ms": 50}
    assert Settings(**flags).raft.heartbeat_ms == 50


def test_a_section_made_by_hand_is_an_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYQUEUE_RAFT__SNAPSHOT_RETRY_MS", "9")
    settings = Settings(raft=RaftSettings(heartbeat_ms=50))
    assert (settings.raft.heartbeat_ms, settings.raft.snapshot_retry_ms) == (50, 1000)
    assert sources(settings)["raft.snapshot_retry_ms"] == "argument"


def test_variables_in_any_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("rayqueue_raft__heartbeat_ms", "50")
    settings = Settings()
    assert settings.raft.heartbeat_ms == 50
    assert sources(settings)["raft.heartbeat_ms"] == "rayqueue_raft__heartbeat_ms"


def test_an_empty_variable_is_none_and_the_word_none_takes_a_limit_away(monkeypatch: pytest.MonkeyPatch) -> None:
    write_toml("[log]\nretention_ms = 5\nretention_bytes = 6\n")
    monkeypatch.setenv("RAYQUEUE_LOG__RETENTION_MS", "")
    monkeypatch.setenv("RAYQUEUE_LOG__RETENTION_BYTES", "none")
    monkeypatch.setenv("RAYQUEUE_NONSENSE", "")
    settings = Settings()
    assert (settings.log.retention_ms, settings.log.retention_bytes) == (5, None)
    assert sources(settings)["log.retention_bytes"] == "RAYQUEUE_LOG__RETENTION_BYTES"


# -- unknown keys -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "key", ["raft.heartbeet_ms", "log.no", "transport.tls", "nonsense", "nonsense.deep", "data_dir.x"]
)
def test_unknown_argument(key: str) -> None:
    text = str(refusal(**{key: 1}))
    assert text.startswith(f"{key} (argument): unknown key")


def test_unknown_key_says_what_there_is() -> None:
    assert "did you mean raft.heartbeat_ms? raft has append_batch_bytes, " in str(refusal(raft={"heartbeet_ms": 1}))
    known = "There are calls, client, cluster, consumer, data_dir, gateway, log, namespace, producer, raft, transport"
    assert known in str(refusal(nonsense=1))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("RAYQUEUE_NONSENSE", "nonsense"),
        ("RAYQUEUE_RAFT__HEARTBEET_MS", "raft.heartbeet_ms"),
        ("RAYQUEUE_RAFT_HEARTBEAT_MS", "raft_heartbeat_ms"),
        ("RAYQUEUE_DATA_DIR__X", "data_dir.x"),
        ("RAYQUEUE_RAFT__SNAPSHOT_RETRY_MS__X", "raft.snapshot_retry_ms.x"),
        ("RAYQUEUE_", ""),
    ],
)
def test_unknown_variable(monkeypatch: pytest.MonkeyPatch, name: str, key: str) -> None:
    monkeypatch.setenv(name, "1")
    assert f"{key} ({name}): unknown key" in str(refusal())


def test_unknown_key_in_a_section_given_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYQUEUE_RAFT", '{"nonsense": 1}')
    assert str(refusal()).startswith("raft.nonsense (RAYQUEUE_RAFT): unknown key")


@pytest.mark.parametrize("name", ["rayqueue.toml", "rayqueue.yaml"])
@pytest.mark.parametrize("key", ["nonsense", "raft.nonsense"])
def test_unknown_key_in_a_file(name: str, key: str) -> None:
    section, _, inner = key.rpartition(".")
    toml = f"[{section}]\n{inner} = 1\n" if section else f"{inner} = 1\n"
    yaml = f"{section}:\n  {inner}: 1\n" if section else f"{inner}: 1\n"
    Path(name).write_text(toml if name.endswith("toml") else yaml)
    assert str(refusal()).startswith(f"{key} ({name}): unknown key")


def test_a_yaml_key_that_is_no_word() -> None:
    Path("rayqueue.yaml").write_text("1: 2\n")
    assert str(refusal()).startswith("1 (rayqueue.yaml): unknown key")


# -- impossible values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, -1, "x", 1.5, None, True, [], {"a": 1}])
def test_a_duration_is_a_positive_whole_number(value: Any) -> None:
    error = refusal(raft={"heartbeat_ms": value})
    assert str(error).startswith("raft.heartbeat_ms (argument): should be ")
    assert f"not {value!r}" in str(error)
    assert error.details["problems"][0][:2] == ("raft.heartbeat_ms", "argument")


@pytest.mark.parametrize("key", ["retention_ms", "retention_bytes"])
@pytest.mark.parametrize("value", [0, -1, True])
def test_retention_is_positive_or_none(key: str, value: Any) -> None:
    assert str(refusal(log={key: value})).startswith(f"log.{key} (argument): should be ")
    assert getattr(Settings(log={key: None}).log, key) is None


def test_impossible_value_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYQUEUE_RAFT__HEARTBEAT_MS", "soon")
    assert str(refusal()).startswith("raft.heartbeat_ms (RAYQUEUE_RAFT__HEARTBEAT_MS): should be a valid integer")


def test_impossible_value_names_its_file() -> None:
    write_toml("[raft]\nheartbeat_ms = true\n")
    assert str(refusal()) == "raft.heartbeat_ms (rayqueue.toml): should be a whole number, not True"


def test_a_good_value_of_higher_rank_does_not_complain_about_the_bad_one_below() -> None:
    write_toml("[raft]\nheartbeat_ms = -1\n")
    assert Settings(raft={"heartbeat_ms": 50}).raft.heartbeat_ms == 50


@pytest.mark.parametrize("value", [5, "x", None, []])
def test_a_section_must_be_a_section(value: Any) -> None:
    assert str(refusal(raft=value)).startswith("raft (argument): must be a section with some of the keys append_")


def test_a_section_that_is_not_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYQUEUE_RAFT", "{heartbeat_ms")
    assert str(refusal()).startswith("raft (RAYQUEUE_RAFT): is not JSON: ")


def test_all_problems_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    write_toml("nonsense = 1\n")
    monkeypatch.setenv("RAYQUEUE_NAMESPACE", "none")
    error = refusal(raft={"snapshot_retry_ms": 0}, log={"cache_bytes": -1})
    assert str(error).startswith("4 settings are wrong:\n- ")
    assert {problem[0] for problem in error.details["problems"]} == {
        "nonsense", "namespace", "raft.snapshot_retry_ms", "log.cache_bytes",
    }  # fmt: skip


# -- contradictions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "key", "other"),
    [
        ({"raft.election_timeout_min_ms": 2500}, "raft.election_timeout_min_ms", "raft.election_timeout_max_ms = 2500"),
        ({"raft.heartbeat_ms": 1000}, "raft.heartbeat_ms", "raft.election_timeout_min_ms = 1000"),
        ({"raft.fast_election_max_ms": 1000}, "raft.fast_election_max_ms", "raft.election_timeout_min_ms = 1000"),
        ({"raft.leader_fallback_ms": 100}, "raft.leader_fallback_ms", "raft.heartbeat_ms = 100"),
        ({"raft.window_bytes": MIB}, "raft.window_bytes", f"raft.append_batch_bytes = {4 * MIB}"),
        ({"raft.max_uncommitted_bytes": MIB}, "raft.max_uncommitted_bytes", f"raft.append_batch_bytes = {4 * MIB}"),
        ({"log.max_batch_bytes": 4 * MIB}, "log.max_batch_bytes", f"raft.append_batch_bytes = {4 * MIB}"),
        ({"log.segment_bytes": MIB - 1}, "log.segment_bytes", f"log.max_batch_bytes = {MIB}"),
        ({"log.map_initial_bytes": MIB}, "log.map_initial_bytes", f"log.max_batch_bytes = {MIB}"),
        ({"log.map_growth_bytes": MIB}, "log.map_growth_bytes", f"log.max_batch_bytes = {MIB}"),
        ({"transport.send_queue_bytes": MIB}, "transport.send_queue_bytes", f"raft.append_batch_bytes = {4 * MIB}"),
        ({"transport.reconnect_min_ms": 2001}, "transport.reconnect_min_ms", "transport.reconnect_max_ms = 2000"),
    ],
)
def test_contradiction(arguments: dict[str, int], key: str, other: str) -> None:
    value = arguments[key]
    text = str(refusal(**arguments))
    assert text.startswith(f"{key} (argument): {value} must be ")
    assert text.endswith(f" {other} (default)")


def test_contradiction_names_both_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    write_toml("[raft]\nappend_batch_bytes = 2000\n")
    monkeypatch.setenv("RAYQUEUE_LOG__MAX_BATCH_BYTES", "3000")
    assert str(refusal()) == (
        "log.max_batch_bytes (RAYQUEUE_LOG__MAX_BATCH_BYTES): "
        "3000 must be less than raft.append_batch_bytes = 2000 (rayqueue.toml)"
    )


@pytest.mark.parametrize("given", ["tls_cert_path", "tls_key_path", "tls_ca_path"])
def test_tls_needs_all_three(given: str) -> None:
    assert str(refusal(transport={given: "x.pem"})).startswith(f"transport.{given} (argument): TLS also needs tls_")
    all_three = {"tls_cert_path": "c.pem", "tls_key_path": "k.pem", "tls_ca_path": "a.pem"}
    assert Settings(transport=all_three).transport.tls_ca_path == Path.cwd() / "a.pem"


# -- files --------------------------------------------------------------------------------------------------------


def test_two_files_are_one_too_many() -> None:
    write_toml("")
    Path("rayqueue.yaml").write_text("")
    assert "rayqueue.toml and rayqueue.yaml are both here" in str(refusal())


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("missing.toml", None, "No such file or directory"),
        ("x.ini", "", "its name must end in .toml, .yaml or .yml"),
        ("bad.toml", "a = ?\n", "line 1"),
        ("bad.yaml", f"transport:\n  secret: [{SECRET}\n", "line 3"),
        ("list.yaml", "- 1\n", "it must hold keys and values"),
        ("latin.toml", b"a = '\xff'\n", "utf-8"),
    ],
)
def test_unreadable_file(name: str, text: str | bytes | None, why: str) -> None:
    if text is not None:
        Path(name).write_bytes(text.encode() if isinstance(text, str) else text)
    told = str(refusal(config_path=name))
    assert told.startswith(f"config_path ({name}): cannot be read: ")
    assert why in told
    assert SECRET not in told


def test_a_directory_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "rayqueue.toml").mkdir()
    assert "config_path (rayqueue.toml): cannot be read" in str(refusal())


# -- secrets ------------------------------------------------------------------------------------------------------


def test_secret_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYQUEUE_TRANSPORT__SECRET", SECRET)
    settings = Settings()
    assert isinstance(settings.transport.secret, SecretStr)
    assert settings.transport.secret.get_secret_value() == SECRET
    shown = {row.key: row.value for row in effective(settings)}
    assert shown["transport.secret"] == "**********"
    assert SECRET not in repr(settings) + str(settings) + str(effective(settings))


@pytest.mark.parametrize("value", ["short-secret", 1234567890123456789])
def test_a_refused_secret_is_not_shown_either(value: Any) -> None:
    error = refusal(transport={"secret": value})
    assert str(error).startswith("transport.secret (argument): should ")
    assert str(value) not in f"{error} {error.details}"


def test_a_misspelled_secret_is_not_shown_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYQUEUE_TRANSPORT__SECRETS", SECRET)
    error = refusal()
    assert SECRET not in f"{error} {error.details}"


# -- sections by hand ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [RaftSettings, LogSettings, TransportSettings])
def test_a_section_by_hand_refuses_in_the_same_words(section: type[BaseModel]) -> None:
    with pytest.raises(ConfigError, match=r"^nonsense \(argument\): unknown key$"):
        section(nonsense=1)
    with pytest.raises(ConfigError, match=r"^snapshot_retry_ms \(argument\): should be greater than 0, not 0$"):
        RaftSettings(snapshot_retry_ms=0)
    with pytest.raises(ConfigError, match=r"heartbeat_ms = 100 \(default\)$"):
        RaftSettings(leader_fallback_ms=100)


def test_a_section_by_hand_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYQUEUE_RAFT__HEARTBEAT_MS", "50")
    assert RaftSettings().heartbeat_ms == 100


# -- what others rely on ------------------------------------------------------------------------------------------


def test_effective_lists_every_setting_once() -> None:
    keys = [row.key for row in effective(Settings())]
    expected = ["data_dir", "namespace"]
    sections: dict[str, type[Section]] = {
        "raft": RaftSettings,
        "log": LogSettings,
        "transport": TransportSettings,
        "calls": CallSettings,
        "client": ClientSettings,
        "producer": ProducerSettings,
        "consumer": ConsumerSettings,
        "cluster": ClusterSettings,
        "gateway": GatewaySettings,
    }
    for name, section in sections.items():
        expected += [f"{name}.{key}" for key in section.model_fields]
    assert keys == expected


def test_every_setting_says_what_it_is_for() -> None:
    told = descriptions()
    assert list(told) == [row.key for row in effective(Settings())]
    assert all(told.values())


def test_settings_travel_to_ray_workers_with_their_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYQUEUE_RAFT__HEARTBEAT_MS", "50")
    settings = Settings(transport={"secret": SECRET})
    monkeypatch.delenv("RAYQUEUE_RAFT__HEARTBEAT_MS")
    copy = pickle.loads(pickle.dumps(settings))
    assert copy == settings
    assert effective(copy) == effective(settings)
    assert copy.transport.secret.get_secret_value() == SECRET
