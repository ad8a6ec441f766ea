"""The console in a real browser, on a real cluster: what a person does with it, and what he sees.

With ``SCREENSHOTS=docs/img`` the pictures of README and docs are made anew (`make screenshots`).
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

import rayqueue
from rayqueue.config import GatewaySettings
from rayqueue.gateway import fleet
from rayqueue.testing import faults
from tests.integration.ray_clusters import ROOT, ray_cluster
from tests.integration.test_gateway import free_ports

pytestmark = pytest.mark.timeout(300)

_T = TypeVar("_T")
_SEEN_MS = 60_000


@pytest.fixture(scope="module")
def chromium() -> str:
    found = subprocess.run([ROOT / "scripts" / "chromium"], capture_output=True, text=True, check=False)
    if found.returncode != 0 and not os.environ.get("CI"):
        pytest.skip(f"no browser: {found.stderr.strip()}")
    assert found.returncode == 0, found.stderr
    return found.stdout.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])


@pytest.fixture(scope="module")
def rq(tmp_path_factory: pytest.TempPathFactory) -> Iterator[rayqueue.RayQueue]:
    with ray_cluster("b1", "b2", "b3"):
        queue = rayqueue.connect(data_dir=tmp_path_factory.mktemp("data"))
        yield queue
        fleet.stop(queue)


@pytest.fixture
def elsewhere() -> Iterator[Callable[[Callable[[], _T]], _T]]:
    """Runs a call in another thread: in the browser's an event loop runs, and a blocking call is refused there."""
    with ThreadPoolExecutor(1) as threads:
        yield lambda call: threads.submit(call).result(60)


class Person:
    """Who looks at the page; whatever the page complains of, or asks anybody else for, is written down."""

    def __init__(self, browser: Browser, url: str, pictures: Path) -> None:
        self.page: Page = browser.new_page(viewport={"width": 1280, "height": 860}, color_scheme="light")
        self.page.set_default_timeout(_SEEN_MS)
        expect.set_options(timeout=_SEEN_MS)
        self.complaints: list[str] = []
        self._url = url
        self._pictures = pictures
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._said)
        self.page.on("request", self._asked)
        self.page.goto(f"{url}/")

    def _said(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:  # answered by the page itself
            self.complaints.append(message.text)

    def _asked(self, request: Any) -> None:
        if not request.url.startswith(self._url):
            self.complaints.append(f"asked {request.url}")

    def picture(self, name: str) -> None:
        self.page.screenshot(path=self._pictures / f"console-{name}.png")

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True)

    def tile(self, label: str) -> Any:
        return self.page.locator(".tile", has=self.page.get_by_text(label, exact=True)).locator(".value")


def test_a_person_makes_a_topic_publishes_watches_lag_resets_a_group_and_sees_a_leader_change(
    rq: rayqueue.RayQueue,
    browser: Browser,
    elsewhere: Callable[[Callable[[], Any]], Any],
    tmp_path: Path,
) -> None:
    rest_port, grpc_port = free_ports()
    settings = GatewaySettings(rest_port=rest_port, grpc_port=grpc_port)
    (told,) = elsewhere(lambda: fleet.start(rq, settings, count=1))
    wanted = os.environ.get("SCREENSHOTS")
    person = Person(browser, told["rest"], ROOT / wanted if wanted else tmp_path)
    page = person.page
    expect(person.tile("Brokers")).to_have_text("3 / 3")

    _creates_a_topic(person)
    _publishes(person)
    _watches_lag(person, rq, elsewhere)
    _resets_the_group(person, rq, elsewhere)
    _redrives_a_dead_letter(person, rq, elsewhere)
    _looks_at_settings(person, rest_port)
    _sees_a_leader_change(person, rq, elsewhere)

    page.goto(f"{told['rest']}/console/#/")
    expect(page.get_by_role("heading", name="Overview")).to_be_visible()
    expect(page.get_by_role("heading", name="Nothing is wrong")).to_be_visible()  # the killed replica is back
    person.picture("overview")
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    person.picture("overview-dark")
    assert person.complaints == []


def _creates_a_topic(person: Person) -> None:
    page = person.page
    page.keyboard.press("g")  # no mouse until here
    page.keyboard.press("t")
    expect(page.get_by_text("There are no topics yet")).to_be_visible()
    person.button("Create topic").click()
    page.get_by_role("textbox", name="Name").fill("orders")
    page.get_by_role("spinbutton", name="Partitions").fill("2")
    page.get_by_role("spinbutton", name="Copies").fill("3")
    person.button("Create").click()
    expect(page.get_by_role("heading", name="orders")).to_be_visible()
    expect(page.get_by_text("healthy")).to_be_visible()
    expect(page.get_by_role("table", name="Partitions").get_by_role("row")).to_have_count(3)


def _publishes(person: Person) -> None:
    page = person.page
    page.get_by_role("link", name="Publish", exact=True).click()
    page.get_by_role("textbox", name="Key").fill("customer-4")
    page.get_by_role("textbox", name="Value", exact=True).fill('{"order": 17, "big": 12345678901234567890}')
    page.get_by_role("textbox", name="Headers").fill("trace: a1b2")
    person.button("Publish").click()
    link = page.get_by_role("link", name="offset 0")
    expect(link).to_be_visible()
    person.picture("publish")
    link.click()
    page.get_by_role("table", name="Records").get_by_role("button", name="0", exact=True).click()
    expect(page.locator("pre")).to_contain_text('"big": 12345678901234567890')  # no digit is lost on the way
    expect(page.locator(".headers")).to_contain_text("a1b2")
    person.picture("records")


def _watches_lag(person: Person, rq: rayqueue.RayQueue, elsewhere: Callable[[Callable[[], Any]], Any]) -> None:
    page = person.page
    consumer = elsewhere(lambda: rq.consumer("orders", group="billing", client="billing-1"))
    elsewhere(lambda: _read(consumer, 1))
    page.keyboard.press("g")
    page.keyboard.press("g")
    page.get_by_role("link", name="billing").click()
    expect(person.tile("To read")).to_have_text("0")
    elsewhere(lambda: _send(rq, 400))
    expect(person.tile("To read")).to_have_text("400")
    expect(person.tile("Behind in time")).not_to_have_text("0 s")
    person.picture("group")
    elsewhere(lambda: _read(consumer, 400))
    expect(person.tile("To read")).to_have_text("0")
    elsewhere(consumer.close)


def _send(rq: rayqueue.RayQueue, count: int) -> None:
    with rq.producer() as producer:
        for number in range(count):
            producer.send("orders", b'{"order": %d, "total": %d.5}' % (number, number % 90), key=b"c%d" % (number % 37))
        producer.flush()


def _read(consumer: Any, count: int) -> None:
    while count > 0:
        count -= len(consumer.poll(timeout_ms=1000))
    consumer.commit()


def _resets_the_group(person: Person, rq: rayqueue.RayQueue, elsewhere: Callable[[Callable[[], Any]], Any]) -> None:
    page = person.page
    expect(page.get_by_text("Nobody is in this group now")).to_be_visible()
    person.button("Reset positions…").click()
    person.button("Preview").click()
    expect(page.get_by_text("Nothing is changed yet.")).to_be_visible()
    expect(page.get_by_role("dialog")).to_contain_text("401 read again")
    person.picture("reset")
    assert elsewhere(lambda: rq.group("billing").lag) == 0  # a preview changes nothing
    person.button("Move 2 positions").click()
    expect(page.get_by_text("Done.")).to_be_visible()
    person.page.get_by_role("dialog").get_by_role("button", name="Close", exact=True).last.click()
    expect(person.tile("To read")).to_have_text("401")
    assert elsewhere(lambda: rq.group("billing").lag) == 401


def _redrives_a_dead_letter(
    person: Person, rq: rayqueue.RayQueue, elsewhere: Callable[[Callable[[], Any]], Any]
) -> None:
    page = person.page
    emails = elsewhere(lambda: rq.queue("emails", model="json", max_deliveries=1, partitions=2))
    elsewhere(lambda: _fails(emails))
    page.keyboard.press("g")
    page.keyboard.press("q")
    row = page.get_by_role("table", name="Queues").get_by_role("row").nth(1)
    expect(row).to_contain_text("emails")
    person.picture("queues")
    row.get_by_role("link", name="emails").click()
    expect(person.tile("Dead letters")).to_have_text("2")
    expect(person.tile("Ready")).to_have_text("3")
    table = page.get_by_role("table", name="Dead letters")
    line = table.get_by_role("row").filter(has_text="bob@example.com")
    expect(line).to_contain_text("no such mailbox")
    person.picture("queue")
    line.get_by_role("button").click()
    expect(page.get_by_role("dialog")).to_contain_text("reject")
    person.picture("dead-letter")
    page.keyboard.press("Escape")
    line.get_by_role("checkbox").check()
    person.button("Redrive 1 job").click()
    expect(page.get_by_text("1 job sent back to work.")).to_be_visible()
    expect(person.tile("Dead letters")).to_have_text("1")
    expect(person.tile("Ready")).to_have_text("4")
    assert elsewhere(lambda: sorted(_worked(emails))) == ["ann", "bob", "cy", "eve"]  # for real
    person.button("Purge all…").click()
    person.button("Throw away").click()
    expect(page.get_by_text("1 job thrown away.")).to_be_visible()
    assert elsewhere(emails.dead.count) == 0
    elsewhere(emails.close)


def _fails(queue: Any) -> None:
    queue.put_many([{"to": f"{name}@example.com"} for name in ("bob", "dan")])
    left = 2
    while left:
        for job in queue.get(2):
            job.reject("no such mailbox", traceback="Traceback (most recent call last):\n  MailboxError: dan, bob")
            left -= 1
    queue.put_many([{"to": f"{name}@example.com"} for name in ("ann", "cy", "eve")])


def _worked(queue: Any) -> list[str]:
    done: list[str] = []
    queue.work(lambda job: done.append(job.value["to"].partition("@")[0]), idle_ms=500)
    return done


def _looks_at_settings(person: Person, rest_port: int) -> None:
    page = person.page
    page.keyboard.press("g")
    page.keyboard.press("s")
    row = page.get_by_role("row").filter(has_text="gateway.rest_port")
    expect(row).to_contain_text(str(rest_port))
    expect(row).to_contain_text("argument")
    person.picture("settings")
    page.keyboard.press("g")
    page.keyboard.press("g")
    page.get_by_role("link", name="billing").click()


def _sees_a_leader_change(person: Person, rq: rayqueue.RayQueue, elsewhere: Callable[[Callable[[], Any]], Any]) -> None:
    page = person.page
    page.get_by_role("link", name="orders/0").click()
    row = page.get_by_role("table", name="Partitions").get_by_role("row").nth(1)
    leader, term = row.get_by_role("cell").nth(1), row.get_by_role("cell").nth(2)
    expect(row).to_contain_text("leads")
    person.picture("topic")
    before = term.inner_text()
    elsewhere(lambda: faults.kill_leader(rq, "orders", 0))
    expect(term).not_to_have_text(before)
    expect(row).to_contain_text("leads")
    now = elsewhere(lambda: rq.topic("orders").partitions[0])
    assert now.term > int(before)
    expect(leader).to_have_text(now.leader or "none")
    expect(page.get_by_text("healthy")).to_be_visible()
