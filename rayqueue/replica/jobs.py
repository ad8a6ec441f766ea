"""Jobs: workers of a queue's partition, and what they ask of its leader.

All settlements of a turn are one entry of the log, all requests for jobs that can
be served another. A request for which there is no job waits here, in the order in
which it came, and costs nothing until there is one. The leader's time for the
queue begins where the log's ended (``QueueTime``).

A worker belongs to the connection on which it asked last; one that has asked the
leader before this one, and asks for nothing now, to the first on which it says
something of its jobs. When that breaks, its leases end, but for those that were
asked for detached.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from rayqueue.config import CallSettings
from rayqueue.errors import (
    InvalidInputError,
    OffsetOutOfRangeError,
    QueueFullError,
    RayQueueError,
    TopicKindError,
)
from rayqueue.partition import Partition, pass_time_command
from rayqueue.partition.jobs.commands import (
    Held,
    Request,
    Settle,
    ack_all_command,
    change_command,
    end_workers_command,
    lease_command,
    settle,
    settle_command,
)
from rayqueue.partition.jobs.leases import Lease
from rayqueue.partition.jobs.moving import MOVED_AT_ONCE, move_batch, plan_move, wasteful
from rayqueue.partition.jobs.queue import Grant, JobQueue, part_of
from rayqueue.partition.jobs.rows import State
from rayqueue.partition.jobs.runs import Part
from rayqueue.protocol import jobs as protocol
from rayqueue.protocol.call import Call
from rayqueue.protocol.calls import encode_answer
from rayqueue.protocol.frames import Kind
from rayqueue.protocol.jobs import (
    MAX_JOBS,
    Changed,
    Job,
    JobResult,
    JobStatus,
    Leased,
    QueueSizes,
    ray_node_of,
)
from rayqueue.replica.disk_reads import DiskReads
from rayqueue.replica.job_reader import JobReader
from rayqueue.replica.parking import Parking
from rayqueue.replica.tail import Tail

if TYPE_CHECKING:
    from rayqueue.replica.core import ReplicaCore

_CHANGED_AT_ONCE = 500
_REQUESTS_PER_ENTRY = 256
_ENTRY_BYTES = 256 * 1024
"""Of settlements, about: what one client sends in one frame stays together."""
_WORKERS_PER_CLIENT = 1000
_GONE_NODES = 1000
"""As many as Ray itself remembers."""
_NEVER = float("inf")
_NOBODY = -1
_ANY = 0
"""What every request for jobs waits for."""

Reply = Callable[[Any], None]


class QueueTime:
    """The time by which a leader stamps: the log's, or its own if that is later, at the moment in which it begins to
    lead; then as its steady clock goes on. A jump of the system's time does not reach it."""

    def __init__(self, wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000) -> None:
        self._wall_ms = wall_ms
        self._base_ms = 0
        self._base_s = 0.0

    def begin(self, log_ms: int) -> None:
        self._base_ms = max(log_ms, self._wall_ms())
        self._base_s = time.monotonic()

    def now_ms(self) -> int:
        if not self._base_ms:
            return self._wall_ms()
        return self._base_ms + int((time.monotonic() - self._base_s) * 1000)

    def at_s(self, time_ms: int) -> float:
        """When it is so late, by ``time.monotonic``; a little after, so that it is not looked at too early."""
        return self._base_s + (time_ms - self._base_ms + 1) / 1000


class _Wanted:
    """A worker that waits for jobs."""

    __slots__ = ("call", "client", "deadline_s", "keys", "reply", "request", "withdrawn")

    def __init__(self, client: int, call: protocol.LeaseJobs, deadline_s: float, request: int, reply: Reply) -> None:
        self.client = client
        self.call = call
        self.keys = (_ANY, _key_of(call.worker, call.attempt)) if call.detached else (_ANY,)
        self.deadline_s = deadline_s
        self.request = request
        self.reply = reply
        self.withdrawn = False


class _Awaited:
    """Somebody who waits for a job's result."""

    __slots__ = ("client", "deadline_s", "keys", "reply")

    def __init__(self, client: int, job_id: int, deadline_s: float, reply: Reply) -> None:
        self.client = client
        self.keys = (job_id,)
        self.deadline_s = deadline_s
        self.reply = reply


class Jobs:
    """On the engine's thread. Of a partition that is a log, it answers that it is none."""

    def __init__(
        self, replica: ReplicaCore[Any], partition: Partition, tail: Tail, disk: DiskReads, settings: CallSettings
    ) -> None:
        self.time = QueueTime()
        self._replica = replica
        self._clients = replica.clients
        self._partition = partition
        self._settings = settings
        self._disk = disk
        self._reader = JobReader(replica, tail, disk)
        self._waiting: Parking[_Wanted] = Parking()
        self._awaiting: Parking[_Awaited] = Parking()
        self._settles: list[tuple[Reply, list[Settle]]] = []
        self._acks: list[tuple[Reply, Held]] = []
        self._ended: list[tuple[str, Reply | None]] = []
        """Workers whose leases are to end, and who is told; None: unless the worker has come back."""
        self._gone_nodes: dict[str, None] = {}
        """Of Ray, dead: those that were heard of last."""
        self._workers: dict[int, set[str]] = {}
        self._client_of: dict[str, int] = {}
        self._proposed: dict[_Wanted, None] = {}
        self._asked_for = 0  # jobs, by leases that are proposed and not applied
        self._ticking = False
        self._moving = False
        self._leads = False

    @property
    def _queue(self) -> JobQueue:
        jobs = self._partition.jobs
        if jobs is None:
            raise TopicKindError("this topic is a log, not a work queue: it has records to read, not jobs to do")
        return jobs

    # -- events ---------------------------------------------------------------------------

    def lead(self) -> None:
        self.time.begin(self._partition.clock.now_ms)
        self._leads = True
        if self._partition.jobs is not None:
            self._end_on(self._gone_nodes)

    def nodes_gone(self, ray_nodes: Iterable[str]) -> None:
        """Ray says that these nodes are dead. Workers there hold nothing any more, though their connections may seem to
        be there: a host that vanishes does not hang up.

        A worker that lives all the same is told that its leases are lost; whatever it asks for from now on it gets.
        """
        news = [each for each in ray_nodes if each not in self._gone_nodes]
        self._gone_nodes.update(dict.fromkeys(news))
        while len(self._gone_nodes) > _GONE_NODES:
            del self._gone_nodes[next(iter(self._gone_nodes))]
        if news and self._leads and self._partition.jobs is not None:
            self._end_on(news)

    def _end_on(self, ray_nodes: Collection[str]) -> None:
        workers = {*self._queue.leases.workers(), *self._client_of}
        for worker in sorted(worker for worker in workers if ray_node_of(worker) in ray_nodes):
            self._withdraw(worker, None)
            self._detach(worker)
            self._ended.append((worker, None))

    def _attach(self, client: int, worker: str) -> None:
        """It has asked the leader before this one for jobs, and holds some. Not if it was just reported dead."""
        workers = self._workers.setdefault(client, set())
        if len(workers) < _WORKERS_PER_CLIENT and all(worker != each for each, _ in self._ended):
            workers.add(worker)
            self._client_of[worker] = client

    def _detach(self, worker: str) -> None:
        client = self._client_of.pop(worker, None)
        if client is not None:
            self._workers[client].discard(worker)

    def lost(self, error: RayQueueError) -> None:
        self._leads = self._ticking = self._moving = False
        self._asked_for = 0
        self._reader.forget()
        self._refuse(error)

    def close(self, error: RayQueueError) -> None:
        self._refuse(error)

    def _refuse(self, error: RayQueueError) -> None:
        settles, self._settles = self._settles, []
        acks, self._acks = self._acks, []
        ended, self._ended = self._ended, []
        replies = [reply for reply, _ in (*settles, *acks)]
        replies += [reply for _, reply in ended if reply is not None]
        replies += [each.reply for each in self._waiting.take_all()]
        replies += [each.reply for each in self._awaiting.take_all()]
        for reply in replies:
            reply(error)

    def needs(self, client: int) -> bool:
        return client in self._workers

    def client_gone(self, client: int) -> None:
        self._waiting.take_client(client)
        self._awaiting.take_client(client)
        for worker in sorted(self._workers.pop(client, ())):
            if self._client_of.get(worker) == client:
                del self._client_of[worker]
                if self._leads:
                    self._ended.append((worker, None))

    @property
    def next_deadline_s(self) -> float:
        jobs = self._partition.jobs
        if jobs is None:
            return _NEVER
        if self._settles or self._acks or (self._leads and len(self._ended) > len(self._busy())):
            return 0.0
        due_s = min(self._waiting.next_deadline_s, self._awaiting.next_deadline_s)
        if self._leads and not self._ticking:
            event_ms = jobs.next_event_ms()
            if event_ms is not None:
                due_s = min(due_s, self.time.at_s(event_ms))
        return due_s

    def gather(self) -> None:
        """All requests of a turn were taken: propose what they ask for."""
        if self._settles:
            self._propose_settles()
        if self._acks:
            self._propose_acks()
        self._serve_waiting()

    def tick(self, now_s: float) -> None:
        jobs = self._partition.jobs
        if jobs is None:
            return
        finished = jobs.take_finished()
        if finished and len(self._awaiting):
            for each in self._awaiting.take(finished):
                self._answer_result(each)
        for expired in self._awaiting.take_expired(now_s):
            expired.reply(JobResult("pending"))
        if self._leads:
            self._end_workers()
            self._let_time_pass(jobs)
            self._serve_waiting()
        for late in self._waiting.take_expired(now_s):
            late.reply(Leased())

    # -- time, and workers that are gone -----------------------------------------------------

    def _let_time_pass(self, jobs: JobQueue) -> None:
        event_ms, now_ms = jobs.next_event_ms(), self.time.now_ms()
        if self._ticking or event_ms is None or event_ms > now_ms:
            return
        self._ticking = True

        def passed(_: Any) -> None:
            self._ticking = False

        try:
            self._replica.propose(pass_time_command(now_ms), passed)
        except RayQueueError:
            self._ticking = False

    def _busy(self) -> list[tuple[str, Reply | None]]:
        """Those of whom something is on its way. What nobody has got is given back first, as if it had not been
        delivered."""
        giving = {each.call.worker for each in self._proposed}
        return [each for each in self._ended if each[0] in giving]

    def _end_workers(self) -> None:
        if not self._ended:
            return
        busy = self._busy()
        ended = [each for each in self._ended if each not in busy]
        self._ended = busy + ended[_REQUESTS_PER_ENTRY:]
        holding, gone = self._queue.leases.workers(), set()
        for worker, reply in ended[:_REQUESTS_PER_ENTRY]:
            if reply is not None:
                self._end_worker(worker, reply)
            elif worker in holding and worker not in self._client_of:
                gone.add(worker)
        if gone:
            self._tell(end_workers_command(self.time.now_ms(), sorted(gone)))

    def _end_worker(self, worker: str, reply: Reply) -> None:
        try:
            self._replica.propose(end_workers_command(self.time.now_ms(), [worker]), lambda told: reply(_first(told)))
        except RayQueueError as error:
            reply(error)

    def _tell(self, command: bytes) -> None:
        """What nobody waits for. If it does not work out, leases end when their time is up."""
        try:
            self._replica.propose(command, lambda _: None)
        except RayQueueError:
            return

    def maintain(self, retained_bytes: int, max_batch_bytes: int) -> None:
        """About once per second: move what holds back the trimming of much that nobody needs."""
        jobs, end = self._partition.jobs, self._partition.next_offset
        if jobs is None or not self._leads or self._moving or self._partition.size_bytes < retained_bytes:
            return
        planned = plan_move(jobs, MOVED_AT_ONCE, end) if wasteful(jobs, end) else []
        if not planned:
            return
        self._moving = True

        def read() -> bytes | None:
            with self._replica.snapshot() as snapshot:
                return move_batch(snapshot, planned, max_batch_bytes // 2)

        def propose(batch: Any) -> None:
            self._moving = False
            if isinstance(batch, bytes) and self._leads:
                self._tell(batch)

        self._replica.once_settled(lambda: self._disk.read(read, propose))

    # -- calls ---------------------------------------------------------------------------------

    def call(self, client: int, request: int, call: Call) -> None:
        jobs = self._queue
        self._replica.check_leads()
        reply = partial(self._reply, client, request)
        match call:
            case protocol.LeaseJobs():
                self._lease(client, request, call, reply)
            case protocol.SettleJobs(worker=worker, settlements=settlements, attached=attached):
                if sum([count for each in settlements for _, count in each.jobs]) > MAX_JOBS:
                    raise InvalidInputError(f"at most {MAX_JOBS} jobs are settled by one call")
                if attached and worker not in self._client_of:
                    self._attach(client, worker)
                self._settles.append((reply, [settle(worker, each) for each in settlements]))
            case protocol.AckAll(leases=leases):
                most = max(MAX_JOBS, jobs.settings.max_leased)
                if sum([count for _, held in leases for _, count in held]) > most:
                    raise InvalidInputError(f"at most {most} jobs are leased here at a time")
                self._acks.append((reply, leases))
            case protocol.WithdrawRequest(worker=worker, attempt=attempt, give_back=give_back):
                withdrawn = self._withdraw(worker, attempt)
                lease = jobs.leases.of_attempt(worker, attempt) if give_back and not withdrawn else None
                if lease is None:
                    reply(withdrawn)
                else:
                    self._give_back(lease, reply)
            case protocol.EndWorker(worker=worker):
                self._withdraw(worker, None)
                self._detach(worker)
                self._ended.append((worker, reply))
            case protocol.GetQueueSizes():
                self._confirmed(client, request, lambda: reply(_sizes(jobs)))
            case protocol.PeekJobs(max_jobs=max_jobs):
                self._confirmed(client, request, lambda: self._peek(max_jobs, reply))
            case protocol.GetJobs(ids=ids):
                self._confirmed(client, request, lambda: reply(_statuses(jobs, ids)))
            case protocol.FindJobs(dedupe_ids=dedupe_ids):
                now_ms = self.time.now_ms()
                found = lambda: reply(tuple([jobs.dedupes.first(each, now_ms) for each in dedupe_ids]))  # noqa: E731
                self._confirmed(client, request, found)
            case protocol.GetResult(id=job_id, wait_ms=wait_ms):
                self._confirmed(client, request, lambda: self._result(client, job_id, wait_ms, reply))
            case protocol.ListDead(first=first, max_jobs=max_jobs):
                self._confirmed(client, request, lambda: self._list_dead(first, max_jobs, reply))
            case protocol.CancelJobs(ids=ids):
                self._change("cancel", ids, reply)
            case protocol.RedriveDead(ids=chosen):
                self._change_dead("redrive", chosen, reply)
            case protocol.PurgeDead(ids=chosen):
                self._change_dead("purge", chosen, reply)
            case _:
                raise InvalidInputError(f"a queue does not answer {type(call).__name__}")

    def _reply(self, client: int, request: int, answer: Any) -> None:
        if isinstance(answer, RayQueueError):
            self._clients.fail(client, request, answer)
        else:
            self._clients.send(client, Kind.ANSWER, request, (encode_answer(answer),))

    def _confirmed(self, client: int, request: int, work: Callable[[], None]) -> None:
        """Once a majority has confirmed that this replica leads."""

        def confirmed(error: Any) -> None:
            if isinstance(error, RayQueueError):
                self._clients.fail(client, request, error)
            else:
                self._clients.serving(client, request, work)

        self._replica.confirm(confirmed)

    # -- leases --------------------------------------------------------------------------------

    def _lease(self, client: int, request: int, call: protocol.LeaseJobs, reply: Reply) -> None:
        if call.least_jobs > call.max_jobs:
            raise InvalidInputError(f"at least {call.least_jobs} of at most {call.max_jobs} jobs are none")
        if len(self._waiting) >= self._settings.max_fetches:
            raise QueueFullError(f"{len(self._waiting)} workers wait here for jobs already, which is the limit")
        workers = self._workers.setdefault(client, set())
        if len(workers) >= _WORKERS_PER_CLIENT and call.worker not in workers:
            raise QueueFullError(f"one connection has at most {_WORKERS_PER_CLIENT} workers")
        wait_s = min(call.wait_ms, self._settings.max_fetch_wait_ms) / 1000
        wanted = _Wanted(client, call, time.monotonic() + wait_s, request, reply)
        if call.detached:
            goes_on = self._go_on(wanted, self._waiting.waiting(_key_of(call.worker, call.attempt)))
        else:
            before = self._client_of.get(call.worker, _NOBODY)
            goes_on = before != client and self._go_on(wanted, self._waiting.of_client(before))
            workers.add(call.worker)
            self._client_of[call.worker] = client
        if goes_on:
            return
        if wait_s:
            self._waiting.add(wanted)
            return

        def now_or_never() -> None:
            if not self._propose_leases([wanted]):
                reply(Leased())

        if self._leads and self._may_get(wanted, 0):
            self._propose_leases([wanted])
        else:
            self._confirmed(client, request, now_or_never)

    def _go_on(self, wanted: _Wanted, before: Iterable[_Wanted]) -> bool:
        """The worker asks on another connection than before. What waits on that one waits for nobody; of one that asks
        detached, whose requests come from several connections, only this request. If it is just being given jobs
        there, it goes on here: True."""
        call, client = wanted.call, wanted.client
        left = [each for each in before if each.client != client and each.call.worker == call.worker]
        for each in self._waiting.remove([each for each in left if not call.detached or _is_same(each.call, call)]):
            each.reply(Leased())
        for each in self._proposed:
            if each.client != client and _is_same(each.call, call):
                each.client, each.request, each.reply = wanted.client, wanted.request, wanted.reply
                each.deadline_s = wanted.deadline_s
                return True
        return False

    def _may_get(self, wanted: _Wanted, asked_for: int) -> bool:
        """Whether there are jobs for it, besides those that others have asked for."""
        jobs, call = self._queue, wanted.call
        if jobs.leases.of_attempt(call.worker, call.attempt) is not None:
            return True
        room = min(jobs.available, jobs.settings.max_leased - jobs.counts.leased)
        return room - asked_for >= call.least_jobs

    def _serve_waiting(self) -> None:
        """Those who have waited longest first, as many as there are jobs for."""
        if not self._leads or not len(self._waiting):
            return
        jobs, asked_for = self._queue, self._asked_for
        served: list[_Wanted] = []
        for wanted in self._waiting.waiting(_ANY):
            if jobs.available <= asked_for or len(served) >= _REQUESTS_PER_ENTRY:
                break
            if self._may_get(wanted, asked_for):
                served.append(wanted)
                asked_for += wanted.call.max_jobs
        if served:
            self._waiting.remove(served)
            self._propose_leases(served)

    def _propose_leases(self, served: list[_Wanted]) -> bool:
        """False if none of them can get anything, or that cannot be found out now."""
        if not self._leads or not any(self._may_get(each, 0) for each in served):
            return False
        asked_for = sum([each.call.max_jobs for each in served])
        requests = [_request(each.call) for each in served]

        def leased(grants: Any) -> None:
            self._asked_for = max(0, self._asked_for - asked_for)
            for wanted in served:
                self._proposed.pop(wanted, None)
            if isinstance(grants, RayQueueError):
                for wanted in served:
                    wanted.reply(grants)
                return
            for wanted, grant in zip(served, grants, strict=True):
                self._granted(wanted, grant)

        self._asked_for += asked_for
        self._proposed.update(dict.fromkeys(served))
        try:
            self._replica.propose(lease_command(self.time.now_ms(), requests), leased)
        except RayQueueError as error:
            leased(error)
        return True

    def _granted(self, wanted: _Wanted, grant: Grant | None) -> None:
        if grant is None:
            if wanted.deadline_s > time.monotonic() and self._is_wanted(wanted):
                self._waiting.add(wanted)  # behind those who came meanwhile: it was beaten to the last job
            else:
                wanted.reply(Leased())
            return
        self._proposed[wanted] = None  # it may be withdrawn while the jobs are read
        self._reader.read(grant.parts, partial(self._hand_out, wanted, grant))

    def _is_wanted(self, wanted: _Wanted) -> bool:
        """Its client is there, and it was not withdrawn."""
        return not wanted.withdrawn and wanted.client in self._workers

    def _withdraw(self, worker: str, attempt: int | None) -> int:
        """What the worker asked for by this attempt; with None, all."""
        waiting = self._waiting.of_client(self._client_of.get(worker, _NOBODY))
        if attempt is not None:
            waiting += self._waiting.waiting(_key_of(worker, attempt))  # detached: it may be anybody's connection
        unwanted = [
            each
            for each in (*waiting, *self._proposed)
            if each.call.worker == worker and attempt in (None, each.call.attempt)
        ]
        for each in unwanted:
            each.withdrawn = True
        for each in self._waiting.remove(unwanted):
            each.reply(Leased())
        return len(unwanted)

    def _hand_out(self, wanted: _Wanted, grant: Grant, jobs: list[Job] | RayQueueError) -> None:
        if not self._is_wanted(wanted):
            self._release(wanted, grant.token, grant.parts, Leased())
        elif isinstance(jobs, RayQueueError):
            # What was moved meanwhile is trimmed where it was: let the worker ask again.
            answer = Leased() if isinstance(jobs, OffsetOutOfRangeError) else jobs
            self._release(wanted, grant.token, grant.parts, answer)
        else:
            fitting = self._fitting(wanted, jobs)
            leased = Leased(grant.token, max(0, grant.until_ms - self.time.now_ms()), tuple(jobs[:fitting]))
            if fitting < len(jobs):
                back = [Part(each.id, 1, 0, 0, 0, False) for each in jobs[fitting:]]
                self._release(wanted, grant.token, back, leased)
            else:
                self._proposed.pop(wanted, None)
                wanted.reply(leased)

    def _fitting(self, wanted: _Wanted, jobs: list[Job]) -> int:
        """As many as the worker wants to have at once, at least one."""
        left = min(wanted.call.max_bytes, self._settings.max_fetch_bytes)
        for number, job in enumerate(jobs):
            left -= len(job.value or b"") + len(job.key or b"") + 64
            left -= sum([len(name) + len(value) for name, value in job.headers])
            if left < 0 and number:
                return number
        return len(jobs)

    def _release(self, wanted: _Wanted, token: int, parts: Sequence[Part], answer: Any) -> None:
        """Nobody gets these: as if they had not been delivered. Once that is committed the worker is answered. If it is
        not, the worker asks again, and whoever leads then gives it the whole lease."""
        runs = tuple([(part.first, part.count) for part in parts])
        given_back = protocol.Settlement(kind="release", token=token, jobs=runs)

        def released(result: Any) -> None:
            if isinstance(answer, Leased) and answer.jobs and not self._is_wanted(wanted):
                # It was cut, and by now nobody wants what is left of it either.
                self._release(wanted, token, [Part(each.id, 1, 0, 0, 0, False) for each in answer.jobs], Leased())
                return
            self._proposed.pop(wanted, None)
            wanted.reply(result if isinstance(result, RayQueueError) else answer)

        if self._leads:
            self._settles.append((released, [settle(wanted.call.worker, given_back)]))
        else:
            released(self._replica.not_leader())

    def _give_back(self, lease: Lease, reply: Reply) -> None:
        """All that the lease holds: nobody knows of it."""
        runs = (*[(first, count) for first, count, _ in lease.runs], *[(job_id, 1) for job_id in lease.ids])
        given_back = protocol.Settlement(kind="release", token=lease.token, jobs=runs)

        def released(result: Any) -> None:
            reply(result if isinstance(result, RayQueueError) else 0)

        self._settles.append((released, [settle(lease.worker, given_back)]))

    # -- settlements ---------------------------------------------------------------------------

    def _propose_settles(self) -> None:
        """As few entries as possible; none is so large that it could not be replicated."""
        settles, self._settles = self._settles, []
        together: list[tuple[Reply, list[Settle]]] = []
        size_bytes = 0
        for each in settles:
            size_bytes += sum([_size_bytes(told) for told in each[1]])
            if size_bytes > _ENTRY_BYTES and together:
                self._propose_together(together)
                together, size_bytes = [], 0
            together.append(each)
        self._propose_together(together)

    def _propose_together(self, settles: list[tuple[Reply, list[Settle]]]) -> None:
        def settled(result: Any) -> None:
            at = 0
            for reply, several in settles:
                reply(result if isinstance(result, RayQueueError) else tuple(result[at : at + len(several)]))
                at += len(several)

        together = [each for _, several in settles for each in several]
        try:
            self._replica.propose(settle_command(self.time.now_ms(), together), settled)
        except RayQueueError as error:
            settled(error)

    def _propose_acks(self) -> None:
        """The same for those that are all or none."""
        acks, self._acks = self._acks, []
        while acks:
            number = size_bytes = 0
            while number < len(acks) and (not number or size_bytes < _ENTRY_BYTES):
                size_bytes += sum([16 + 12 * len(jobs) for _, jobs in acks[number][1]])
                number += 1
            together, acks = acks[:number], acks[number:]
            self._propose_acks_together(together)

    def _propose_acks_together(self, acks: list[tuple[Reply, Held]]) -> None:
        def acked(results: Any) -> None:
            for at, (reply, _) in enumerate(acks):
                reply(results if isinstance(results, RayQueueError) else results[at])

        try:
            self._replica.propose(ack_all_command(self.time.now_ms(), [held for _, held in acks]), acked)
        except RayQueueError as error:
            acked(error)

    # -- what there is -------------------------------------------------------------------------

    def _peek(self, max_jobs: int, reply: Reply) -> None:
        jobs = self._queue
        parts: list[Part] = []
        for lane in range(jobs.settings.lanes - 1, -1, -1):
            found = [part_of(row) for row in map(jobs.rows.get, jobs.ready.in_order(lane, max_jobs)) if row is not None]
            for start, end in jobs.frontier(lane).runs() if lane in jobs.frontiers else ():
                ids = [each for each in range(start, min(end, start + max_jobs)) if jobs.rows.get(each) is None]
                found += [Part(each, 1, each, 0, lane, False) for each in ids]
                if len(found) > 2 * max_jobs:
                    break
            parts += found if jobs.settings.fair_by_key else sorted(found)
            if len(parts) >= max_jobs:
                break
        self._reader.read(
            parts[:max_jobs], lambda found: reply(found if isinstance(found, RayQueueError) else tuple(found))
        )

    def _result(self, client: int, job_id: int, wait_ms: int, reply: Reply) -> None:
        wait_s = min(wait_ms, self._settings.max_fetch_wait_ms) / 1000
        awaited = _Awaited(client, job_id, time.monotonic() + wait_s, reply)
        jobs = self._queue
        row = jobs.rows.get(job_id)
        pending = row is not None and row.state not in (State.DEAD, State.CANCELLED) and row.want_result
        if not wait_ms or not pending:
            self._answer_result(awaited)
        elif len(self._awaiting) >= self._settings.max_fetches:
            reply(QueueFullError(f"{len(self._awaiting)} wait here for results already, which is the limit"))
        else:
            self._awaiting.add(awaited)

    def _answer_result(self, awaited: _Awaited) -> None:
        jobs, (job_id,) = self._queue, awaited.keys
        result = jobs.results.get(job_id)
        if result is not None:
            awaited.reply(JobResult(result.state, result.value, result.reason, result.traceback))
            return
        row = jobs.rows.get(job_id)
        if row is None:
            ended = job_id < self._partition.next_offset and _statuses(jobs, (job_id,))[0].state == "gone"
            awaited.reply(JobResult("gone", reason=protocol.ENDED if ended else ""))
        elif not row.want_result:
            awaited.reply(JobResult("gone"))
        else:
            awaited.reply(JobResult("dead" if row.state == State.DEAD else "pending"))

    # -- dead letters --------------------------------------------------------------------------

    def _list_dead(self, first: int, max_jobs: int, reply: Reply) -> None:
        jobs = self._queue
        found = map(jobs.rows.get, jobs.dead.ids(first, max_jobs))
        rows = [replace(row) for row in found if row is not None]  # copies: another thread reads them
        if rows:
            self._reader.read_dead(rows, self._settings.max_fetch_bytes, reply)
        else:
            reply(())

    def _change(self, kind: str, ids: Sequence[int], reply: Reply) -> None:
        self._replica.propose(change_command(self.time.now_ms(), kind, ids), reply)

    def _change_dead(self, kind: str, ids: Sequence[int] | None, reply: Reply) -> None:
        chosen = self._queue.dead.ids(0, _CHANGED_AT_ONCE) if ids is None else list(ids)
        more = ids is None and len(chosen) == _CHANGED_AT_ONCE

        def changed(result: Any) -> None:
            reply(result if isinstance(result, RayQueueError) else Changed(result, more))

        self._change(kind, chosen, changed)


def _is_same(one: protocol.LeaseJobs, other: protocol.LeaseJobs) -> bool:
    """The one repeats the other."""
    return (one.worker, one.attempt) == (other.worker, other.attempt)


def _key_of(worker: str, attempt: int) -> int:
    """By which a detached request that waits is found; another one may have it too."""
    return hash((worker, attempt)) or 1


def _request(call: protocol.LeaseJobs) -> Request:
    return Request(call.worker, call.attempt, call.max_jobs, call.least_jobs, call.lease_ms)


def _size_bytes(told: Settle) -> int:
    return 256 + 4 * (len(told.reason) + len(told.traceback)) + len(told.result or b"") + 12 * len(told.jobs)


def _first(result: Any) -> Any:
    return result if isinstance(result, RayQueueError) else result[0]


def _sizes(jobs: JobQueue) -> QueueSizes:
    counts = jobs.counts
    return QueueSizes(
        counts.ready,
        counts.leased,
        counts.delayed,
        counts.dead,
        counts.expired,
        counts.dropped,
        counts.deduplicated,
    )


_STATES = {State.READY: "ready", State.LEASED: "leased", State.DELAYED: "delayed", State.DEAD: "dead"}


def _statuses(jobs: JobQueue, ids: Sequence[int]) -> tuple[JobStatus, ...]:
    leased = sorted([(first, count) for lease in jobs.leases.holding() for first, count, _ in lease.runs])
    return tuple([_status(jobs, job_id, leased) for job_id in ids])


def _status(jobs: JobQueue, job_id: int, leased: list[tuple[int, int]]) -> JobStatus:
    row = jobs.rows.get(job_id)
    if row is not None:
        return JobStatus(_STATES.get(State(row.state), "gone"), row.deliveries)
    at = bisect_right(leased, (job_id, MAX_JOBS + 1)) - 1
    if at >= 0 and job_id < leased[at][0] + leased[at][1]:
        return JobStatus("leased", 1)
    if any(front.count and front.has(job_id) for front in jobs.frontiers.values()):
        return JobStatus("ready")
    return JobStatus("gone")
