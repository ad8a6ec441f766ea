"""Access to every route: the tests walk the app's own table, so that a new one without a check fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from rayqueue.config import GatewaySettings
from rayqueue.errors import ConfigError
from rayqueue.gateway.audit import TOPIC as AUDIT
from rayqueue.gateway.keys import TOPIC as KEYS
from rayqueue.gateway.keys import KeyStore
from rayqueue.gateway.rest import console
from rayqueue.gateway.rest.pages import PUBLIC
from rayqueue.gateway.rest.route import Route
from rayqueue.gateway.rest.routes import ROUTES
from rayqueue.gateway.rest.serving import make_app
from rayqueue.gateway.server import Gateway, check_bind
from rayqueue.records import Record
from rayqueue.testing import memory, wait_for

GUARDED = [route for route in ROUTES if not route.public]
KINDS = ("topic", "group", "queue")
NAMES = {"topic": "orders", "group": "g", "session": "x.y", "consumer": "c", "queue": "emails", "job": "0-0"}


def ask(rest: httpx.Client, route: Route, key: str | None) -> httpx.Response:
    path = route.path.format_map(NAMES)
    body: dict[str, Any] = {"json": route.example} if route.example is not None else {}
    params = {"consumerID": "c"} if route.path.endswith("/consume") else {}
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return rest.request(route.method, path, params=params, headers=headers, **body)


def key_id(token: str) -> str:
    return token.split("_", 2)[1]


@pytest.fixture
def guarded(rq: memory.MemoryQueue, start: Callable[..., Gateway]) -> Iterator[tuple[httpx.Client, dict[str, str]]]:
    rq.create_topic("orders")
    store = KeyStore(rq)
    keys = {}
    for name, grants in {
        "all": ["*:*:*"],
        "none": [],
        "elsewhere": [f"{verb}:{kind}:other*" for verb in ("publish", "consume") for kind in KINDS],
        "revoked": ["*:*:*"],
    }.items():
        token, _ = store.create(name, grants)
        keys[name] = token.text
        if name == "revoked":
            store.revoke(token.key_id)
    gateway = start()
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.rest_port}", timeout=30) as rest:
        yield rest, keys


@pytest.mark.slow
def test_the_app_has_the_routes_of_the_table_and_public_pages_and_nothing_else(gateway: Gateway) -> None:
    app = make_app(gateway)
    there = {getattr(route, "path", "") for route in app.routes}
    assert there == {route.path for route in ROUTES} | set(PUBLIC) | set(console.PUBLIC)
    assert {route.path for route in ROUTES if route.public} == {"/healthz", "/readyz"}


@pytest.mark.slow
def test_no_route_answers_without_a_key_that_is_good(guarded: tuple[httpx.Client, dict[str, str]]) -> None:
    rest, keys = guarded
    wrong = keys["all"][:-2] + ("AA" if keys["all"][-2:] != "AA" else "BB")
    for route in GUARDED:
        for key in (None, "nonsense", wrong, keys["revoked"]):
            answer = ask(rest, route, key)
            assert (answer.status_code, answer.json()["code"]) == (401, "unauthenticated"), (route.path, key)
            assert "www-authenticate" in answer.headers
            assert (key or "?") not in answer.text


@pytest.mark.slow
def test_no_route_does_what_a_key_may_not(guarded: tuple[httpx.Client, dict[str, str]], rq: memory.MemoryQueue) -> None:
    rest, keys = guarded
    for route in GUARDED:
        for key in ("none", "elsewhere"):
            answer = ask(rest, route, keys[key])
            if "{session}" in route.path:
                assert answer.status_code == 421, route.path  # nobody's session: nothing to be allowed
            elif key == "elsewhere" and route.path in ("/topics",):
                assert answer.status_code == 403
            else:
                assert (answer.status_code, answer.json()["code"]) == (403, "permission_denied"), (route.path, key)
    assert [each.name for each in rq.topics()] == ["orders"]


@pytest.mark.slow
def test_a_session_is_of_the_key_that_opened_it(
    guarded: tuple[httpx.Client, dict[str, str]], rq: memory.MemoryQueue
) -> None:
    rest, keys = guarded
    token, _ = KeyStore(rq).create("second", ["*:*:*"])
    opened = rest.post(
        "/v1/groups/g/sessions", json={"topics": ["orders"]}, headers={"Authorization": f"Bearer {keys['all']}"}
    )
    path = f"/v1/sessions/{opened.json()['session']}"

    def as_second() -> httpx.Response | None:
        answer = rest.get(f"{path}/records", headers={"Authorization": f"Bearer {token.text}"})
        return None if answer.status_code == 401 else answer  # the gateway has not heard of this key yet

    assert wait_for(as_second, "the new key to be known").status_code == 410


def test_a_key_that_is_revoked_is_of_no_use_at_once_and_the_grant_is_looked_at_again(
    guarded: tuple[httpx.Client, dict[str, str]], rq: memory.MemoryQueue
) -> None:
    rest, _ = guarded
    store = KeyStore(rq)
    token, _ = store.create("short", ["consume:*:*", "publish:topic:orders"])
    headers = {"Authorization": f"Bearer {token.text}"}

    def status(method: str, path: str, **rest_of: Any) -> int:
        return rest.request(method, path, headers=headers, **rest_of).status_code

    wait_for(lambda: status("GET", "/v1/topics/orders/records") == 200, "the key to be known")
    session = rest.post("/v1/groups/g/sessions", json={"topics": ["orders"]}, headers=headers).json()["session"]
    store.grant(token.key_id, ["consume:*:*"], take_back=True)
    wait_for(lambda: status("GET", f"/v1/sessions/{session}/records", params={"wait_ms": 0}) == 403, "the grant to go")
    store.revoke(token.key_id)
    wait_for(lambda: status("POST", f"/v1/sessions/{session}/heartbeat") == 401, "the key to be revoked")


def test_whats_the_gateways_own_is_out_of_reach_and_the_audit_can_be_read(
    guarded: tuple[httpx.Client, dict[str, str]],
) -> None:
    rest, keys = guarded
    headers = {"Authorization": f"Bearer {keys['all']}"}
    for method, path in (
        ("GET", f"/v1/topics/{KEYS}/records"),
        ("GET", f"/v1/topics/{KEYS}/tail"),
        ("GET", f"/v1/topics/{KEYS}"),
        ("DELETE", f"/v1/topics/{KEYS}"),
        ("GET", f"/topic/{KEYS}/peek"),
    ):
        assert rest.request(method, path, headers=headers).status_code == 403, path
    sent = rest.post(f"/v1/topics/{KEYS}/records", json={"records": [{"text": "x"}]}, headers=headers)
    assert sent.status_code == 403
    joined = rest.post("/v1/groups/g/sessions", json={"topics": [KEYS]}, headers=headers)
    assert joined.status_code == 403
    assert rest.post("/v1/topics", json={"name": "made"}, headers=headers).status_code == 201
    ask(rest, GUARDED[0], keys["revoked"])
    assert rest.delete("/v1/topics/orders", headers={"Authorization": f"Bearer {keys['none']}"}).status_code == 403

    def entries() -> list[Any] | None:
        answer = rest.get("/v1/topics/rayqueue-gateway.audit/records", params={"max": 100}, headers=headers)
        found = [each["value"] for each in answer.json().get("records", [])]
        told = {(each["verb"], each["name"], each.get("outcome", "done")) for each in found}
        wanted = {
            ("create", "made", "done"),
            ("request", "GET /v1/topics", "unauthenticated"),
            ("request", "DELETE /v1/topics/orders", "permission_denied"),
            ("delete", key_id(keys["revoked"]), "done"),
        }
        return found if wanted <= told else None

    found = wait_for(entries, "the audit to be written")
    made = next(each for each in found if each["name"] == "made")
    assert (made["source"], made["key"]) == ("127.0.0.1", key_id(keys["all"]))
    denied = next(each for each in found if each["name"] == "DELETE /v1/topics/orders")
    assert (denied["source"], denied["needs"]) == ("127.0.0.1", "delete:topic:orders")
    by_command = [each for each in found if each["kind"] == "key"]
    assert {each["name"] for each in by_command} == {key_id(each) for each in keys.values()}
    assert all(each["key"] and each["source"] for each in by_command)
    text = str(found)
    for key in keys.values():
        assert key.split("_", 2)[2] not in text


@pytest.mark.slow
def test_who_is_refused_all_the_time_does_not_fill_the_audit(
    guarded: tuple[httpx.Client, dict[str, str]], rq: memory.MemoryQueue
) -> None:
    rest, _ = guarded
    began_s = time.monotonic()
    before = rq.topic(AUDIT).records  # of the keys that were made
    for _ in range(200):
        assert rest.get("/v1/topics").status_code == 401
    most = 20 + 10 * (time.monotonic() - began_s)
    wait_for(lambda: rq.topic(AUDIT).records > before, "its first entry")
    assert rq.topic(AUDIT).records - before <= most


@pytest.mark.slow
def test_nobody_is_let_in_while_the_keys_cannot_be_looked_up(
    rq: memory.MemoryQueue, start: Callable[..., Gateway]
) -> None:
    token, _ = KeyStore(rq).create("all", ["*:*:*"])
    gateway = start(keys_stale_ms=300)
    headers = {"Authorization": f"Bearer {token.text}"}
    with httpx.Client(base_url=f"http://127.0.0.1:{gateway.rest_port}", timeout=30, headers=headers) as rest:
        wait_for(lambda: rest.get("/v1/topics").status_code in (200, 503), "an answer")
        with rq.without_leader(KEYS):
            wait_for(lambda: rest.get("/v1/topics").status_code == 503, "nobody to be let in", 20)
        wait_for(lambda: rest.get("/v1/topics").status_code == 200, "the keys to be known again", 20)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", ""])
def test_others_reach_it_only_with_keys_and_tls(host: str, tmp_path: Any) -> None:
    files = {"tls_cert_path": tmp_path / "c", "tls_key_path": tmp_path / "k"}
    with pytest.raises(ConfigError, match=r"tls_cert_path.*rayqueue keys create"):
        check_bind(GatewaySettings(host=host), keys=False)
    with pytest.raises(ConfigError, match="tls_cert_path"):
        check_bind(GatewaySettings(host=host), keys=True)
    with pytest.raises(ConfigError, match="rayqueue keys create"):
        check_bind(GatewaySettings(host=host, **files), keys=False)
    check_bind(GatewaySettings(host=host, **files), keys=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_on_loopback_it_is_open(host: str) -> None:
    check_bind(GatewaySettings(host=host), keys=False)


def test_a_gateway_for_others_does_not_start_open(start: Callable[..., Gateway]) -> None:
    with pytest.raises(ConfigError, match="does not listen"):
        start(host="0.0.0.0")


def test_records_of_keys_that_cannot_be_read_change_nothing(rq: memory.MemoryQueue) -> None:
    from rayqueue.gateway.keys import apply
    from rayqueue.gateway.principals import KeyRing

    ring = KeyRing()
    for value in (b"", b"{}", b"\xff", b'{"type":"created"}', None):
        apply(ring, Record(0, 0, None, value))
    assert len(ring) == 0
