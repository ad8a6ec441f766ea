/** The way in: `new RayQueue({ url, key })`. */

import { type Client, createClient, type Interceptor } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";

import { retried } from "./backoff.js";
import { RayQueueError } from "./errors.js";
import { AdminService } from "./gen/rayqueue/v1/admin_pb.js";
import { QueueService } from "./gen/rayqueue/v1/queues_pb.js";
import { RecordService } from "./gen/rayqueue/v1/records_pb.js";
import { Producer } from "./producer.js";
import { WorkQueue } from "./queue.js";
import { type Isolation, isolationOf, type NewRecord, QueueRecord, toWire, type Written } from "./records.js";
import { type ReceivedRecord, type SubscribeOptions, subscription } from "./subscription.js";

export interface RayQueueOptions {
  /** Of the gateway's gRPC: `http://127.0.0.1:8281`, or `https://…`. */
  url: string;
  /** An API key, of `rayqueue keys create`. */
  key?: string;
  /** How long a call may take. Streams have no end. */
  timeoutMs?: number;
  /** PEM of the authority that signed the gateway's certificate, if it is not a public one. */
  ca?: string | Buffer;
}

export interface TopicSettings {
  partitions?: number;
  replication?: number;
  lanes?: number;
  retentionMs?: number;
  retentionBytes?: number;
  maxRecordBytes?: number;
  maxBacklogRecords?: number;
}

export interface QueueSettings {
  partitions?: number;
  replication?: number;
  lanes?: number;
  leaseMs?: number;
  maxLeaseMs?: number;
  maxDeliveries?: number;
  retryBackoffMs?: number;
  retryBackoffMaxMs?: number;
  dedupeWindowMs?: number;
  maxRecordBytes?: number;
  maxBacklogRecords?: number;
  deadLetter?: boolean;
  orderedByKey?: boolean;
  fairByKey?: boolean;
}

export interface AppendOptions {
  /** A name for this call. Repeated with the same one, nothing is written twice; so it is repeated, until `timeoutMs`. */
  idempotencyKey?: string;
  timeoutMs?: number;
}

export class RayQueue {
  /** Everything that the gateway can tell and do about topics, groups and the cluster, as it is generated. */
  readonly admin: Client<typeof AdminService>;
  readonly #records: Client<typeof RecordService>;
  readonly #queues: Client<typeof QueueService>;
  readonly #session: Http2SessionManager;
  readonly #timeoutMs: number;

  constructor(options: RayQueueOptions) {
    const { key } = options;
    const withKey: Interceptor = (next) => (request) => {
      if (key) request.header.set("authorization", `Bearer ${key}`);
      return next(request);
    };
    this.#timeoutMs = options.timeoutMs ?? 30_000;
    this.#session = new Http2SessionManager(options.url, {}, options.ca === undefined ? {} : { ca: options.ca });
    const transport = createGrpcTransport({
      baseUrl: options.url,
      interceptors: [withKey],
      sessionManager: this.#session,
    });
    this.admin = createClient(AdminService, transport);
    this.#records = createClient(RecordService, transport);
    this.#queues = createClient(QueueService, transport);
  }

  /** Made, with a leader for every partition, when this resolves. */
  async createTopic(name: string, settings: TopicSettings = {}, options: { ifMissing?: boolean } = {}): Promise<void> {
    const request = { name, settings: toWireSettings(settings), ifMissing: options.ifMissing ?? false };
    await this.#call(this.admin.createTopic(request, { timeoutMs: this.#timeoutMs }));
  }

  async deleteTopic(name: string): Promise<void> {
    await this.#call(this.admin.deleteTopic({ name }, { timeoutMs: this.#timeoutMs }));
  }

  /** Writes records together; resolves once all are on the disks of a majority, in the order given. */
  async append(topic: string, records: NewRecord[], options: AppendOptions = {}): Promise<Written[]> {
    const request = { topic, records: records.map(toWire), idempotencyKey: options.idempotencyKey ?? "" };
    const mayRepeat = options.idempotencyKey !== undefined;
    const answer = await retried(options.timeoutMs ?? this.#timeoutMs, mayRepeat, (timeoutMs) =>
      this.#records.append(request, { timeoutMs }),
    );
    return answer.records.map((each) => ({
      partition: each.partition,
      offset: each.offset,
      timestampMs: Number(each.timestampMs),
    }));
  }

  /** Made, with a leader for every partition, when this resolves. */
  async createQueue(name: string, settings: QueueSettings = {}, options: { ifMissing?: boolean } = {}): Promise<void> {
    const request = { name, settings: toWireSettings(settings), ifMissing: options.ifMissing ?? false };
    await this.#call(this.#queues.createQueue(request, { timeoutMs: this.#timeoutMs }));
  }

  async deleteQueue(name: string): Promise<void> {
    await this.#call(this.#queues.deleteQueue({ queue: name }, { timeoutMs: this.#timeoutMs }));
  }

  /** A work queue that is there. */
  queue(name: string): WorkQueue {
    return new WorkQueue(this.#queues, name, this.#timeoutMs);
  }

  /** For many records: one stream, in batches. Close it, or use `await using`. */
  producer(topic: string, options: { maxWaiting?: number } = {}): Producer {
    return new Producer(this.#records, topic, options.maxWaiting ?? 10_000);
  }

  /** As a member of a group: `for await (const record of rq.subscribe({ group, topics })) { …; await record.ack(); }` */
  subscribe(options: SubscribeOptions): AsyncGenerator<ReceivedRecord, void, undefined> {
    return subscription(this.#records, options);
  }

  /** Without a group, from a place on, and on with what is written later. Nothing is acknowledged. */
  async *fetch(
    topic: string,
    from: {
      partition?: number;
      offset?: bigint | number;
      start?: "earliest" | "latest";
      isolation?: Isolation;
      signal?: AbortSignal;
    } = {},
  ): AsyncGenerator<QueueRecord, void, undefined> {
    const abort = new AbortController();
    const signal = from.signal ? AbortSignal.any([abort.signal, from.signal]) : abort.signal;
    const place = {
      ...(from.partition === undefined ? {} : { partition: from.partition }),
      ...(from.offset === undefined ? {} : { offset: BigInt(from.offset) }),
    };
    try {
      for await (const { records } of this.#records.fetch(
        { topic, ...place, startAtEnd: from.start === "latest", isolation: isolationOf(from.isolation) },
        { signal },
      ))
        for (const each of records) yield new QueueRecord(each);
    } catch (error) {
      if (!signal.aborted) throw RayQueueError.of(error);
    } finally {
      abort.abort();
    }
  }

  /** Ends the connection. Close producers before, and leave subscriptions. */
  close(): void {
    this.#session.abort();
  }

  async #call<T>(calling: Promise<T>): Promise<T> {
    try {
      return await calling;
    } catch (error) {
      throw RayQueueError.of(error);
    }
  }
}

function toWireSettings(settings: object): Record<string, bigint | boolean> {
  const given = Object.entries(settings as Record<string, number | boolean | undefined>);
  const made: Record<string, bigint | boolean> = {};
  for (const [name, value] of given)
    if (value !== undefined) made[name] = typeof value === "boolean" ? value : BigInt(value);
  return made;
}
