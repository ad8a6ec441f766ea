/**
 * A work queue: jobs that are put, worked on under a lease, and end by `ack`, `nack` or `reject`. While this program
 * holds a job its lease is extended; if the program dies, the job is given to another when the lease ends. What is said
 * of a job may be repeated and told to any gateway, so a gateway that dies meanwhile costs a pause, not the work.
 */

import { create, type MessageInitShape } from "@bufbuild/protobuf";
import type { Client } from "@connectrpc/connect";

import { backoffMs, retried } from "./backoff.js";
import { RayQueueError } from "./errors.js";
import {
  type DeadJob as WireDeadJob,
  type GetJobResultResponse,
  type Job as WireJob,
  NewJobSchema,
  type QueueService,
  type StreamJobsRequest,
  StreamJobsRequestSchema,
} from "./gen/rayqueue/v1/queues_pb.js";
import { Outbox } from "./outbox.js";
import { type Bytes, Contents, type NewContents, toValue, toWire } from "./records.js";

const AT_ONCE = 1000; // leases in one request
const EXTEND_AFTER = 1 / 3;
const CLOSING_MS = 2000;

/** A job to be put. */
export interface NewJob extends NewContents {
  /** Higher is more urgent; below the queue's `lanes`. */
  priority?: number;
  /** Not before so long from now. */
  delayMs?: number;
  /** Not before this time. */
  deliverAt?: Date;
  /** Not later than so long from now: then it is a dead letter. */
  ttlMs?: number;
  /** Of those with the same one within the queue's `dedupeWindowMs` only the first is put. */
  dedupeId?: string;
  /** What becomes of it is asked for with `result`; it is kept for the queue's `resultTtlMs`. */
  wantResult?: boolean;
}

/** What a job is acknowledged with, for whoever put it with `wantResult`. Of `value` and `json` one. */
export interface NewResult {
  value?: Bytes | null;
  json?: unknown;
}

/** A job as it is in the queue now. */
export interface JobState {
  state: "ready" | "leased" | "delayed" | "dead" | "gone";
  deliveries: number;
}

export interface PutJob {
  id: string;
  /** There was one with the same `dedupeId`: this one. */
  duplicate: boolean;
}

export interface QueueSize {
  ready: number;
  leased: number;
  delayed: number;
  dead: number;
}

export interface Failure {
  timeMs: number;
  kind: string;
  worker: string;
  reason: string;
  traceback: string;
}

export interface JobsOptions {
  /** Jobs that may be on their way, or wait here, at a time. Those not begun when the loop is left are given back. */
  credit?: number;
  /** How long a lease lasts; it is extended while this program holds the job. */
  leaseMs?: number;
  signal?: AbortSignal;
  /** Open a stream that broke again. */
  reconnect?: boolean;
}

/** A job that waits: nobody holds it by this. */
export class PeekedJob extends Contents {
  readonly id: string;
  /** How often it was given out before. */
  readonly deliveries: number;
  readonly priority: number;
  readonly putAtMs: number;

  constructor(wire: WireJob) {
    super(wire);
    this.id = wire.jobId;
    this.deliveries = wire.deliveries;
    this.priority = wire.priority;
    this.putAtMs = Number(wire.putAtMs);
  }
}

/** What became of a job. Its value is what it was acknowledged with. */
export class JobResult extends Contents {
  /** `pending`: it was none of the others in time. */
  readonly state: "done" | "dead" | "cancelled" | "pending";
  /** Of one that is dead. */
  readonly reason: string;
  readonly traceback: string;

  constructor(wire: GetJobResultResponse) {
    super({ headers: [], ...(wire.result === undefined ? {} : { value: wire.result }) });
    this.state = wire.state as JobResult["state"];
    this.reason = wire.reason;
    this.traceback = wire.traceback;
  }
}

/** A job in hand. It ends in one way: `ack`, `nack`, `reject` or `release`; or its lease ends, and it comes again. */
export class Job extends Contents {
  readonly id: string;
  readonly lease: string;
  /** This one included: 1 for a job that was never given out before. */
  readonly deliveries: number;
  readonly priority: number;
  readonly putAtMs: number;
  /** Its lease has ended, and somebody else may work on it: what is said of it does not count any more. */
  lost = false;
  readonly #queue: WorkQueue;

  constructor(wire: WireJob, queue: WorkQueue) {
    super(wire);
    this.id = wire.jobId;
    this.lease = wire.lease;
    this.deliveries = wire.deliveries;
    this.priority = wire.priority;
    this.putAtMs = Number(wire.putAtMs);
    this.#queue = queue;
  }

  /**
   * It is done, and never comes back; with a result for whoever waits for it. Resolves once that is on the disks of a
   * majority; rejects with `lease_lost`.
   */
  async ack(result?: NewResult): Promise<void> {
    const value = result && toValue(result);
    if (value === undefined) await this.#queue.ack(this);
    else await this.#queue.end("ack", [this], { result: value });
  }

  /** It is to be tried again, after `delayMs` or the queue's back-off; after `max_deliveries` it is a dead letter. */
  async nack(said: { delayMs?: number; reason?: string; traceback?: string } = {}): Promise<void> {
    await this.#queue.end("nack", [this], said);
  }

  /** It can never be done: to the dead letters at once. */
  async reject(reason = "", said: { traceback?: string } = {}): Promise<void> {
    await this.#queue.end("reject", [this], { reason, ...said });
  }

  /** It was not begun: as if it had not been delivered. */
  async release(): Promise<void> {
    await this.#queue.end("release", [this], {});
  }

  /** Keep it for so long from now, or for another lease of the queue. For how long it is kept, in milliseconds. */
  async extend(leaseMs = 0): Promise<number> {
    return await this.#queue.extend([this], leaseMs);
  }
}

export class DeadJob extends Contents {
  readonly id: string;
  readonly reason: string;
  readonly deliveries: number;
  readonly priority: number;
  readonly putAtMs: number;
  readonly diedAtMs: number;
  /** What happened to each delivery, the oldest first. */
  readonly history: readonly Failure[];

  constructor(wire: WireDeadJob) {
    super(wire);
    this.id = wire.jobId;
    this.reason = wire.reason;
    this.deliveries = wire.deliveries;
    this.priority = wire.priority;
    this.putAtMs = Number(wire.putAtMs);
    this.diedAtMs = Number(wire.diedAtMs);
    this.history = wire.history.map(({ timeMs, kind, worker, reason, traceback }) => ({
      timeMs: Number(timeMs),
      kind,
      worker,
      reason,
      traceback,
    }));
  }
}

interface Waiting {
  job: Job;
  resolve: () => void;
  reject: (error: unknown) => void;
}

type Ending = "ack" | "nack" | "reject" | "release";

export class WorkQueue {
  #acks: Waiting[] = [];
  /** Jobs in hand: those that nobody holds any more are not extended. */
  readonly #held = new Map<string, WeakRef<Job>>();
  #timer: ReturnType<typeof setTimeout> | null = null;
  #leaseMs = 30_000;

  constructor(
    private readonly client: Client<typeof QueueService>,
    readonly name: string,
    private readonly timeoutMs: number,
  ) {}

  /** Resolves once it is on the disks of a majority. With a `dedupeId` or an `idempotencyKey` it is repeated if need be. */
  async put(job: NewJob, options: { idempotencyKey?: string } = {}): Promise<PutJob> {
    const [put] = await this.putMany([job], options);
    if (!put) throw new RayQueueError("a short answer", "outcome_unknown", true);
    return put;
  }

  /** In the order given. */
  async putMany(jobs: NewJob[], options: { idempotencyKey?: string } = {}): Promise<PutJob[]> {
    const request = { queue: this.name, jobs: jobs.map(toWireJob), idempotencyKey: options.idempotencyKey ?? "" };
    const once = options.idempotencyKey !== undefined || jobs.every((each) => each.dedupeId !== undefined);
    const answer = await retried(this.timeoutMs, once, (timeoutMs) => this.client.putJobs(request, { timeoutMs }));
    return answer.jobs.map(({ jobId, duplicate }) => ({ id: jobId, duplicate }));
  }

  /** The next jobs, at most so many; waits up to `waitMs` for the first. */
  async get(options: { max?: number; waitMs?: number; leaseMs?: number } = {}): Promise<Job[]> {
    const waitMs = options.waitMs ?? 1000;
    const request = {
      queue: this.name,
      maxJobs: options.max ?? 1,
      waitMs,
      leaseMs: BigInt(options.leaseMs ?? 0),
    };
    const answer = await retried(this.timeoutMs + waitMs, false, (timeoutMs) =>
      this.client.getJobs(request, { timeoutMs }),
    );
    return answer.jobs.map((each) => this.received(each));
  }

  /** `for await (const job of queue.jobs()) { …; await job.ack(); }`; until the loop is left. */
  async *jobs(options: JobsOptions = {}): AsyncGenerator<Job, void, undefined> {
    const credit = Math.max(1, options.credit ?? 10);
    let failures = 0;
    while (!options.signal?.aborted) {
      const stream = new Stream(this.client, this, options, credit);
      let over: RayQueueError | "ended";
      try {
        for (;;) {
          const next = await stream.next();
          if (!(next instanceof Job)) {
            over = next;
            break;
          }
          if (!next.lost) yield next;
        }
      } finally {
        await stream.close();
      }
      if (options.signal?.aborted) return;
      if (stream.opened) failures = 0;
      const again = over === "ended" || over.retriable || over.code === "session_gone";
      if (options.reconnect === false || !again) {
        if (over === "ended") return;
        throw over;
      }
      await new Promise((resolve) => setTimeout(resolve, backoffMs(failures++)));
    }
  }

  /** What became of a job that was put with `wantResult`; waits for it. Rejects with `unknown_job` if nobody knows. */
  async result(jobId: string, options: { waitMs?: number } = {}): Promise<JobResult> {
    const waitMs = options.waitMs ?? 1000;
    const request = { queue: this.name, jobId, waitMs };
    return new JobResult(
      await retried(this.timeoutMs + waitMs, true, (timeoutMs) => this.client.getJobResult(request, { timeoutMs })),
    );
  }

  /** The jobs that are given out next, at most so many. They stay. */
  async peek(max = 10): Promise<PeekedJob[]> {
    const request = { queue: this.name, maxJobs: max };
    const { jobs } = await retried(this.timeoutMs, true, (timeoutMs) => this.client.peekJobs(request, { timeoutMs }));
    return jobs.map((each) => new PeekedJob(each));
  }

  async state(jobId: string): Promise<JobState> {
    const request = { queue: this.name, jobId };
    const found = await retried(this.timeoutMs, true, (timeoutMs) => this.client.getJobState(request, { timeoutMs }));
    return { state: found.state as JobState["state"], deliveries: found.deliveries };
  }

  /** Drop a job that waits. Rejects with `unknown_job` if somebody works on it, or it is gone. */
  async cancel(jobId: string): Promise<void> {
    const request = { queue: this.name, jobId };
    await retried(this.timeoutMs, false, (timeoutMs) => this.client.cancelJob(request, { timeoutMs }));
  }

  /** Exact numbers, over all partitions. */
  async size(): Promise<QueueSize> {
    const { size } = await retried(this.timeoutMs, true, (timeoutMs) =>
      this.client.getQueueSize({ queue: this.name }, { timeoutMs }),
    );
    const [ready, leased, delayed, dead] = [size?.ready, size?.leased, size?.delayed, size?.dead].map(Number);
    return { ready: ready ?? 0, leased: leased ?? 0, delayed: delayed ?? 0, dead: dead ?? 0 };
  }

  /** Dead letters by their ids, at most `max`, behind `after`. */
  async dead(options: { max?: number; after?: string } = {}): Promise<DeadJob[]> {
    const request = { queue: this.name, maxJobs: options.max ?? 100, after: options.after ?? "" };
    const { jobs } = await retried(this.timeoutMs, true, (timeoutMs) =>
      this.client.listDeadJobs(request, { timeoutMs }),
    );
    return jobs.map((each) => new DeadJob(each));
  }

  /** Let these dead letters be tried again, or all of them. How many there were. */
  async redrive(ids: string[] | "all"): Promise<number> {
    const request = { queue: this.name, ...chosen(ids) };
    const answer = await retried(this.timeoutMs, false, (timeoutMs) =>
      this.client.redriveDeadJobs(request, { timeoutMs }),
    );
    return Number(answer.redriven);
  }

  /** Delete these dead letters for good, or all of them. How many there were. */
  async purge(ids: string[] | "all"): Promise<number> {
    const request = { queue: this.name, ...chosen(ids) };
    const answer = await retried(this.timeoutMs, false, (timeoutMs) =>
      this.client.purgeDeadJobs(request, { timeoutMs }),
    );
    return Number(answer.purged);
  }

  // -- for jobs and streams ------------------------------------------------------------------------

  /** @internal */
  received(wire: WireJob): Job {
    const job = new Job(wire, this);
    this.#held.set(job.lease, new WeakRef(job));
    this.#leaseMs = Math.max(100, Number(wire.leaseMs));
    this.#arm();
    return job;
  }

  /** Acknowledgements of one turn of the event loop go together. @internal */
  async ack(job: Job): Promise<void> {
    await new Promise<void>((resolve, reject) => {
      if (this.#acks.push({ job, resolve, reject }) === 1) setImmediate(() => void this.#flush());
    });
  }

  async #flush(): Promise<void> {
    const waiting = this.#acks.splice(0);
    for (let at = 0; at < waiting.length; at += AT_ONCE) {
      const some = waiting.slice(at, at + AT_ONCE);
      try {
        await this.end(
          "ack",
          some.map((each) => each.job),
          {},
        );
        for (const each of some) each.resolve();
      } catch (error) {
        // Of several, those that are not lost are done.
        const lost = error instanceof RayQueueError && error.code === "lease_lost";
        for (const each of some)
          if (lost && !each.job.lost) each.resolve();
          else each.reject(error);
      }
    }
  }

  /** Says how these ended, until it is told; rejects with `lease_lost` if one of them was lost. @internal */
  async end(
    how: Ending,
    jobs: Job[],
    said: { delayMs?: number; reason?: string; traceback?: string; result?: Uint8Array<ArrayBuffer> },
  ): Promise<void> {
    for (const job of jobs) this.#held.delete(job.lease);
    const { reason = "", traceback = "" } = said;
    const told = { queue: this.name, leases: jobs.map((each) => each.lease) };
    const delay = said.delayMs === undefined ? {} : { delayMs: BigInt(said.delayMs) };
    const result = said.result === undefined ? {} : { result: said.result };
    const calls = {
      ack: (timeoutMs: number) => this.client.ackJobs({ ...told, ...result }, { timeoutMs }),
      nack: (timeoutMs: number) => this.client.nackJobs({ ...told, ...delay, reason, traceback }, { timeoutMs }),
      reject: (timeoutMs: number) => this.client.rejectJobs({ ...told, reason, traceback }, { timeoutMs }),
      release: (timeoutMs: number) => this.client.releaseJobs(told, { timeoutMs }),
    };
    this.#check(jobs, await this.#told(jobs, retried<{ lost: string[] }>(this.timeoutMs, true, calls[how])));
  }

  /** @internal */
  async extend(jobs: Job[], leaseMs: number): Promise<number> {
    const request = { queue: this.name, leases: jobs.map((each) => each.lease), leaseMs: BigInt(leaseMs) };
    const extending = retried(this.timeoutMs, true, (timeoutMs) => this.client.extendJobs(request, { timeoutMs }));
    const answer = await this.#told(jobs, extending);
    this.#check(jobs, answer);
    return Number(answer.leaseMs);
  }

  /** If all were lost, the call itself says so. */
  async #told<T extends { lost: string[] }>(jobs: Job[], calling: Promise<T>): Promise<T> {
    try {
      return await calling;
    } catch (error) {
      if (error instanceof RayQueueError && error.code === "lease_lost") this.#lost(jobs);
      throw error;
    }
  }

  #check(jobs: Job[], answer: { lost: string[] }): void {
    if (answer.lost.length === 0) return;
    const names = new Set(answer.lost);
    this.#lost(jobs.filter((each) => names.has(each.lease)));
    throw new RayQueueError(
      `the leases of ${answer.lost.length} of ${jobs.length} jobs of ${this.name} had ended; the others are settled`,
      "lease_lost",
      false,
    );
  }

  #lost(jobs: Job[]): void {
    for (const job of jobs) {
      job.lost = true;
      this.#held.delete(job.lease);
    }
  }

  #arm(): void {
    if (this.#timer !== null || this.#held.size === 0) return;
    this.#timer = setTimeout(() => {
      this.#timer = null;
      void this.#extendHeld().finally(() => this.#arm());
    }, this.#leaseMs * EXTEND_AFTER);
    this.#timer.unref();
  }

  async #extendHeld(): Promise<void> {
    const jobs: Job[] = [];
    for (const [lease, held] of this.#held) {
      const job = held.deref();
      if (job) jobs.push(job);
      else this.#held.delete(lease);
    }
    for (let at = 0; at < jobs.length; at += AT_ONCE) {
      const some = jobs.slice(at, at + AT_ONCE);
      const request = { queue: this.name, leases: some.map((each) => each.lease), leaseMs: BigInt(this.#leaseMs) };
      const within = Math.max(1000, this.#leaseMs * EXTEND_AFTER);
      const extending = retried(within, true, (timeoutMs) => this.client.extendJobs(request, { timeoutMs }));
      await this.#told(some, extending).then(
        ({ lost }) => this.#lost(some.filter((each) => lost.includes(each.lease))),
        () => undefined, // asked again in a while; what is lost is known by then
      );
    }
  }
}

/** One life of a stream of jobs. Its jobs outlive it. */
class Stream {
  readonly #abort = new AbortController();
  readonly #outbox = new Outbox<StreamJobsRequest>();
  readonly #jobs: Job[] = [];
  #taken = 0;
  #over: RayQueueError | "ended" | null = null;
  #wake: (() => void) | null = null;
  #heartbeat: ReturnType<typeof setInterval> | null = null;
  readonly #ran: Promise<void>;
  opened = false;

  constructor(
    client: Client<typeof QueueService>,
    private readonly queue: WorkQueue,
    private readonly options: JobsOptions,
    private readonly credit: number,
  ) {
    const leaseMs = BigInt(options.leaseMs ?? 0);
    const open = { queue: queue.name, credit, leaseMs, timeoutMs: 0 };
    this.#put({ case: "open", value: { ...open, $typeName: "rayqueue.v1.OpenJobs" } });
    this.#ran = this.#run(client);
  }

  #put(message: NonNullable<MessageInitShape<typeof StreamJobsRequestSchema>["message"]>): void {
    this.#outbox.put(create(StreamJobsRequestSchema, { message }));
  }

  async #run(client: Client<typeof QueueService>): Promise<void> {
    const signals = this.options.signal ? [this.#abort.signal, this.options.signal] : [this.#abort.signal];
    try {
      for await (const answer of client.streamJobs(this.#outbox, { signal: AbortSignal.any(signals) })) {
        if (!this.opened) {
          this.opened = true;
          const beat = (): void => this.#put({ case: "heartbeat", value: { $typeName: "rayqueue.v1.Heartbeat" } });
          this.#heartbeat = setInterval(beat, Math.max(250, answer.timeoutMs / 3));
          this.#heartbeat.unref();
        }
        for (const each of answer.jobs) this.#jobs.push(this.queue.received(each));
        this.#wake?.();
      }
      this.#end("ended");
    } catch (error) {
      this.#end(RayQueueError.of(error));
    }
  }

  #end(over: RayQueueError | "ended"): void {
    this.#over ??= over;
    if (this.#heartbeat) clearInterval(this.#heartbeat);
    this.#outbox.end();
    this.#wake?.();
  }

  /** The next job; an error, or "ended", once the stream is over and all that came is taken. */
  async next(): Promise<Job | RayQueueError | "ended"> {
    for (;;) {
      const job = this.options.signal?.aborted ? undefined : this.#jobs.shift();
      if (job) {
        this.#taken += 1;
        if (this.#taken * 2 >= this.credit) {
          this.#put({ case: "credit", value: { $typeName: "rayqueue.v1.JobCredit", jobs: this.#taken } });
          this.#taken = 0;
        }
        return job;
      }
      if (this.#over !== null) return this.#over;
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
  }

  /**
   * What was not begun is given back, with what is on its way here: that is the caller's as soon as the gateway has
   * written it, so the gateway ends the stream, and everything before its end is read.
   */
  async close(): Promise<void> {
    this.#end("ended");
    const timer = setTimeout(() => this.#abort.abort(), CLOSING_MS);
    await this.#ran;
    clearTimeout(timer);
    const left = this.#jobs.splice(0);
    if (left.length > 0) await this.queue.end("release", left, {}).catch(() => undefined); // their leases end
  }
}

function toWireJob(job: NewJob): MessageInitShape<typeof NewJobSchema> {
  const { value, key, headers, priority } = toWire(job);
  return {
    headers,
    priority,
    ...(value === undefined ? {} : { value }),
    ...(key === undefined ? {} : { key }),
    delayMs: BigInt(job.delayMs ?? 0),
    ...(job.deliverAt === undefined ? {} : { deliverAtMs: BigInt(job.deliverAt.getTime()) }),
    ...(job.ttlMs === undefined ? {} : { ttlMs: BigInt(job.ttlMs) }),
    ...(job.dedupeId === undefined ? {} : { dedupeId: job.dedupeId }),
    wantResult: job.wantResult ?? false,
  };
}

function chosen(ids: string[] | "all"): { jobIds: string[]; all: boolean } {
  return ids === "all" ? { jobIds: [], all: true } : { jobIds: ids, all: false };
}
