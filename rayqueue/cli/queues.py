"""`rayqueue queues` and `rayqueue dlq`: work queues, their jobs and their dead letters."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rayqueue.cli.common import Address, AsJson, DataDir, Namespace, add, connected, console, print_json, table
from rayqueue.cli.topics import with_settings
from rayqueue.errors import InvalidInputError
from rayqueue.protocol.topics import TopicSettings, declared

if TYPE_CHECKING:
    from rayqueue.client.handle import RayQueue
    from rayqueue.client.queue.dead import DeadJob
    from rayqueue.client.queue.queue import JobQueue

app = typer.Typer(help="Work queues: create, list, describe, put, get.", no_args_is_help=True, rich_markup_mode=None)
dlq = typer.Typer(
    help="Dead letters of a queue: list, show, redrive, purge.", no_args_is_help=True, rich_markup_mode=None
)

Name = Annotated[str, typer.Argument(help="The queue.")]
Ids = Annotated[list[str] | None, typer.Argument(help="Ids of jobs, such as 0-17.")]
All = Annotated[bool, typer.Option("--all", help="All of them.")]

_SHOWN = 120
_SIZES = ("ready", "leased", "delayed", "dead")
_NOT_OF_QUEUES = ("queue", "retention_ms", "retention_bytes", "retention_consumed")
_SETTINGS = [each for each in declared(TopicSettings).values() if each.name not in _NOT_OF_QUEUES]


@app.command()
@with_settings(_SETTINGS, defaults=True)
def create(
    name: Name,
    settings: dict[str, Any],
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Make a queue, or find one that is like this."""
    with connected(address, data_dir, namespace) as rq:
        rq.queue(name, **settings)
        info = rq.topic(name)
    if as_json:
        print_json(info)
    else:
        console().print(f"{name}: {len(info.partitions)} partitions", style="green")


@app.command("list")
def list_queues(
    address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """All queues, and how many jobs are in each."""
    with connected(address, data_dir, namespace) as rq:
        found = _described(rq)
    if as_json:
        print_json(found)
        return
    if not found:
        console().print("There is no queue. rq.queue(NAME), or `rayqueue queues create NAME`, makes one.")
        return
    made = table("queue", "partitions", *_SIZES, right=("partitions", *_SIZES))
    for each in found:
        cells = (each["name"], each["partitions"], *(each[size] for size in _SIZES))
        add(made, *cells, style="yellow" if each["dead"] else None)
    console().print(made)


def _described(rq: RayQueue) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for topic in rq.topics():
        if topic.settings.queue:
            size = rq.queue(topic.name, create=False).size()
            sizes = {name: getattr(size, name) for name in size.__struct_fields__}
            found.append({"name": topic.name, "partitions": len(topic.partitions), **sizes})
    return found


@app.command()
def describe(
    name: Name, address: Address = None, data_dir: DataDir = None, namespace: Namespace = None, as_json: AsJson = False
) -> None:
    """A queue's settings, its sizes, and the next job."""
    with connected(address, data_dir, namespace) as rq:
        queue = _opened(rq, name)
        size, settings, next_jobs = queue.size(), rq.topic(name).settings, queue.peek(1)
    sizes = {each: getattr(size, each) for each in size.__struct_fields__}
    if as_json:
        print_json({"name": name, "sizes": sizes, "settings": settings, "next": [each.id for each in next_jobs]})
        return
    out = console()
    out.print(f"{name}: " + ", ".join(f"{count:,} {what}" for what, count in sizes.items()))
    if next_jobs:
        next_job = next_jobs[0]
        out.print(f"next: {next_job.id}, put {_time(next_job.put_ms)}: {_text(next_job.value)}", markup=False)
    made = table("setting", "value", title="Settings")
    for each in _SETTINGS:
        add(made, each.name, getattr(settings, each.name))
    out.print(made)


@app.command()
def put(
    name: Name,
    values: Annotated[list[str] | None, typer.Argument(help="Jobs. Without any: lines of standard input.")] = None,
    key: Annotated[str | None, typer.Option(help="Of all of them.")] = None,
    priority: Annotated[int, typer.Option(min=0, help="Below the queue's lanes; higher ones first.")] = 0,
    delay_ms: Annotated[int, typer.Option(min=0, help="Not before so long from now.")] = 0,
    ttl_ms: Annotated[int | None, typer.Option(min=1, help="Not later than this.")] = None,
    dedupe_id: Annotated[str | None, typer.Option(help="Of one job: put once within the queue's window.")] = None,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Put jobs, and print their ids."""
    jobs = [each.encode() for each in values] if values else [line.rstrip(b"\n") for line in sys.stdin.buffer]
    if dedupe_id is not None and len(jobs) != 1:
        raise InvalidInputError("--dedupe-id is of one job")
    with connected(address, data_dir, namespace) as rq, _opened(rq, name) as queue:
        ids = queue.put_many(
            jobs,
            keys=None if key is None else [key.encode()] * len(jobs),
            priority=priority,
            delay_ms=delay_ms,
            ttl_ms=ttl_ms,
            dedupe_ids=None if dedupe_id is None else [dedupe_id],
        ).ids
    if as_json:
        print_json([str(each) for each in ids])
    else:
        for each in ids:
            console().print(str(each))


@app.command()
def get(
    name: Name,
    max_jobs: Annotated[int, typer.Option("--max", min=1, help="So many, at most.")] = 1,
    timeout_ms: Annotated[int, typer.Option(min=0, help="How long to wait for the first.")] = 1000,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Take jobs, print them and acknowledge them. To look at them only: `queues peek`."""
    with connected(address, data_dir, namespace) as rq, _opened(rq, name) as queue:
        jobs = queue.get(max_jobs, timeout_ms=timeout_ms)
        _print_jobs(jobs, as_json)
        queue.ack(jobs)


@app.command()
def peek(
    name: Name,
    max_jobs: Annotated[int, typer.Option("--max", min=1, help="So many, at most.")] = 10,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """The next jobs, which stay where they are."""
    with connected(address, data_dir, namespace) as rq:
        _print_jobs(_opened(rq, name).peek(max_jobs), as_json)


def _print_jobs(jobs: Sequence[Any], as_json: bool) -> None:
    if as_json:
        print_json(
            [
                {
                    "id": str(job.id),
                    "key": _text(job.key, None),
                    "value": _text(job.value, None),
                    "priority": job.priority,
                    "deliveries": job.deliveries,
                    "put_ms": job.put_ms,
                }
                for job in jobs
            ]
        )
        return
    made = table("id", "key", "value", "priority", "deliveries", "put", right=("priority", "deliveries"))
    for job in jobs:
        add(made, job.id, _text(job.key), _text(job.value), job.priority, job.deliveries, _time(job.put_ms))
    console().print(made)


# -- dead letters -----------------------------------------------------------------------------------


@dlq.command("list")
def list_dead(
    name: Name,
    max_jobs: Annotated[int, typer.Option("--max", min=1, help="So many, at most.")] = 50,
    after: Annotated[str | None, typer.Option(help="Behind this id.")] = None,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Jobs that were given up, and why."""
    with connected(address, data_dir, namespace) as rq:
        queue = _opened(rq, name)
        dead, total = queue.dead.list(max_jobs, after=after), queue.dead.count()
    if as_json:
        print_json([_dead(each) for each in dead])
        return
    if not dead:
        console().print(f"{name} has no dead letters" if after is None else f"there are none behind {after}")
        return
    made = table("id", "died", "deliveries", "reason", "value", right=("deliveries",))
    for each in dead:
        add(made, each.id, _time(each.died_ms), each.deliveries, each.reason[:_SHOWN], _text(each.value))
    console().print(made)
    if len(dead) < total:
        console().print(f"{len(dead):,} of {total:,}; more: --after {dead[-1].id}")


@dlq.command()
def show(
    name: Name,
    job_id: Annotated[str, typer.Argument(help="The job's id, such as 0-17.")],
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """One dead letter, and all that has happened to it."""
    with connected(address, data_dir, namespace) as rq:
        dead = _opened(rq, name).dead.get(job_id)
    if as_json:
        print_json(_dead(dead))
        return
    out = console()
    out.print(f"{name} {dead.id}: put {_time(dead.put_ms)}, died {_time(dead.died_ms)}, {dead.deliveries} deliveries")
    out.print(f"key: {_text(dead.key)}", markup=False)
    for header, value in dead.headers:
        out.print(f"header {header}: {_text(value)}", markup=False)
    out.print(f"value: {_text(dead.value, None)}", markup=False, soft_wrap=True)
    for each in dead.history:
        out.print(f"{_time(each.time_ms)} {each.kind} by {each.worker}: {each.reason}", markup=False, soft_wrap=True)
    if dead.traceback:
        out.print(dead.traceback, markup=False, soft_wrap=True)


@dlq.command()
def redrive(
    name: Name,
    job_ids: Ids = None,
    everything: All = False,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Let dead letters be tried again, with their history."""
    _check_chosen(job_ids, everything)
    with connected(address, data_dir, namespace) as rq:
        count = _opened(rq, name).dead.redrive(*(job_ids or ()), all=everything)
    _print_count(count, "redriven", as_json)


@dlq.command()
def purge(
    name: Name,
    job_ids: Ids = None,
    everything: All = False,
    address: Address = None,
    data_dir: DataDir = None,
    namespace: Namespace = None,
    as_json: AsJson = False,
) -> None:
    """Delete dead letters for good."""
    _check_chosen(job_ids, everything)
    with connected(address, data_dir, namespace) as rq:
        count = _opened(rq, name).dead.purge(*(job_ids or ()), all=everything)
    _print_count(count, "purged", as_json)


def _check_chosen(job_ids: list[str] | None, everything: bool) -> None:
    if bool(job_ids) == everything:
        raise InvalidInputError("name the jobs, or give --all")


def _print_count(count: int, done: str, as_json: bool) -> None:
    if as_json:
        print_json({done: count})
    else:
        console().print(f"{count:,} {done}", style="green" if count else "yellow")


def _opened(rq: RayQueue, name: str) -> JobQueue[Any, Any]:
    return rq.queue(name, create=False)


def _dead(dead: DeadJob[Any, Any]) -> dict[str, Any]:
    return {
        "id": str(dead.id),
        "key": _text(dead.key, None),
        "value": _text(dead.value, None),
        "headers": {name: _text(value, None) for name, value in dead.headers},
        "priority": dead.priority,
        "deliveries": dead.deliveries,
        "put_ms": dead.put_ms,
        "died_ms": dead.died_ms,
        "reason": dead.reason,
        "history": dead.history,
    }


def _time(time_ms: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_ms / 1000))


def _text(value: Any, most: int | None = _SHOWN) -> str | None:
    """Bytes as people read them."""
    if value is None:
        return None
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    return text if most is None or len(text) <= most else f"{text[:most]}…"
