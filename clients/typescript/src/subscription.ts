/**
 * A subscription: a member of a group, as an async iterator. Records come until the loop is left; what is not
 * acknowledged by then comes again, to this or another member. A stream that breaks is opened again, with pauses.
 */

import { create, type MessageInitShape } from "@bufbuild/protobuf";
import type { Client } from "@connectrpc/connect";

import { backoffMs } from "./backoff.js";
import { RayQueueError } from "./errors.js";
import type { Record as WireRecord } from "./gen/rayqueue/v1/common_pb.js";
import { type RecordService, type SubscribeRequest, SubscribeRequestSchema } from "./gen/rayqueue/v1/records_pb.js";
import { Outbox } from "./outbox.js";
import { type Isolation, isolationOf, QueueRecord } from "./records.js";

export interface SubscribeOptions {
  group: string;
  topics: string[];
  /** Where a group begins that has no position yet. */
  start?: "earliest" | "latest";
  /** Records that may be on their way, or wait here, at a time. */
  credit?: number;
  /** The gateway ends the session after so long a silence of this program. */
  timeoutMs?: number;
  isolation?: Isolation;
  /** Open a stream that broke again. */
  reconnect?: boolean;
  signal?: AbortSignal;
}

/** A record that is to be acknowledged. */
export class ReceivedRecord extends QueueRecord {
  readonly #stream: Stream;

  constructor(wire: WireRecord, stream: Stream) {
    super(wire);
    this.#stream = stream;
  }

  /** It is done: the group does not read it again. Resolves once the position is on the disks of a majority. */
  async ack(): Promise<void> {
    await this.#stream.ack(this);
  }
}

interface Acks {
  records: QueueRecord[];
  resolve: () => void;
  reject: (error: unknown) => void;
  done: Promise<void>;
}

/** One life of the stream: one session of the group. */
class Stream {
  readonly abort = new AbortController();
  readonly #outbox = new Outbox<SubscribeRequest>();
  readonly #acks = new Map<bigint, Acks>();
  readonly #records: ReceivedRecord[] = [];
  #gathering: Acks | null = null;
  #number = 0n;
  #taken = 0;
  #over: RayQueueError | "ended" | null = null;
  #wake: (() => void) | null = null;
  #heartbeat: ReturnType<typeof setInterval> | null = null;
  /** It was let in: the next pause is short again. */
  joined = false;

  constructor(
    client: Client<typeof RecordService>,
    private readonly options: SubscribeOptions,
    private readonly credit: number,
  ) {
    const join = {
      group: options.group,
      topics: options.topics,
      startAtEnd: options.start === "latest",
      credit,
      timeoutMs: options.timeoutMs ?? 0,
      isolation: isolationOf(options.isolation),
    };
    this.#put({ case: "join", value: { ...join, $typeName: "rayqueue.v1.Join" } });
    void this.#run(client);
  }

  #put(message: NonNullable<MessageInitShape<typeof SubscribeRequestSchema>["message"]>): void {
    this.#outbox.put(create(SubscribeRequestSchema, { message }));
  }

  async #run(client: Client<typeof RecordService>): Promise<void> {
    const signals = this.options.signal ? [this.abort.signal, this.options.signal] : [this.abort.signal];
    try {
      for await (const { message } of client.subscribe(this.#outbox, { signal: AbortSignal.any(signals) })) {
        if (message.case === "records") {
          for (const each of message.value.records) this.#records.push(new ReceivedRecord(each, this));
        } else if (message.case === "acked") {
          const acks = this.#acks.get(message.value.number);
          this.#acks.delete(message.value.number);
          if (message.value.problem) acks?.reject(RayQueueError.ofProblem(message.value.problem));
          else acks?.resolve();
        } else if (message.case === "joined") {
          this.joined = true;
          const every_ms = Math.max(250, message.value.timeoutMs / 3);
          this.#heartbeat = setInterval(
            () => this.#put({ case: "heartbeat", value: { $typeName: "rayqueue.v1.Heartbeat" } }),
            every_ms,
          );
          this.#heartbeat.unref();
        }
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
    const gone = new RayQueueError(
      "the session ended before this was acknowledged; it comes again",
      "session_gone",
      false,
    );
    for (const acks of [...this.#acks.values(), ...(this.#gathering ? [this.#gathering] : [])]) acks.reject(gone);
    this.#acks.clear();
    this.#gathering = null;
    this.#wake?.();
  }

  /** The next record; an error, or "ended", once the stream is over and all that came is taken. */
  async next(): Promise<ReceivedRecord | RayQueueError | "ended"> {
    for (;;) {
      if (this.#over !== null) return this.#over; // what waits here belongs to a session that is gone: it comes again
      const record = this.#records.shift();
      if (record) {
        this.#taken += 1;
        if (this.#taken * 2 >= this.credit) {
          this.#put({ case: "credit", value: { $typeName: "rayqueue.v1.Credit", records: this.#taken } });
          this.#taken = 0;
        }
        return record;
      }
      await new Promise<void>((resolve) => (this.#wake = resolve));
    }
  }

  /** Acknowledgements of one turn of the event loop go together. */
  async ack(record: QueueRecord): Promise<void> {
    if (this.#over !== null)
      throw new RayQueueError("the session of this record is gone; it comes again", "session_gone", false);
    let gathering = this.#gathering;
    if (!gathering) {
      let resolve = (): void => undefined;
      let reject: (error: unknown) => void = () => undefined;
      const done = new Promise<void>((yes, no) => ((resolve = yes), (reject = no)));
      done.catch(() => undefined); // told to those who wait for it
      gathering = this.#gathering = { records: [], resolve, reject, done };
      setImmediate(() => this.#flush());
    }
    gathering.records.push(record);
    await gathering.done;
  }

  #flush(): void {
    const acks = this.#gathering;
    if (!acks) return;
    this.#gathering = null;
    const number = this.#number++;
    this.#acks.set(number, acks);
    const places = acks.records.map(({ topic, partition, offset, lane }) => ({
      $typeName: "rayqueue.v1.Place" as const,
      topic,
      partition,
      offset,
      lane,
    }));
    this.#put({ case: "ack", value: { $typeName: "rayqueue.v1.AckRecords", number, places } });
  }

  /** Acknowledgements that were asked for are sent, and answered, before the group is left. */
  async close(): Promise<void> {
    this.#flush();
    const open = [...this.#acks.values()].map((each) => each.done.catch(() => undefined));
    await Promise.race([Promise.all(open), new Promise((resolve) => setTimeout(resolve, 5000).unref())]);
    this.#outbox.end();
    this.#end("ended");
    this.abort.abort();
  }
}

export async function* subscription(
  client: Client<typeof RecordService>,
  options: SubscribeOptions,
): AsyncGenerator<ReceivedRecord, void, undefined> {
  const credit = Math.max(1, options.credit ?? 500);
  let failures = 0;
  while (!options.signal?.aborted) {
    const stream = new Stream(client, options, credit);
    let over: RayQueueError | "ended";
    try {
      for (;;) {
        const next = await stream.next();
        if (!(next instanceof ReceivedRecord)) {
          over = next;
          break;
        }
        yield next;
      }
    } finally {
      await stream.close();
    }
    if (options.signal?.aborted) return;
    if (stream.joined) failures = 0;
    const again = over === "ended" || over.retriable || over.code === "session_gone";
    if (options.reconnect === false || !again) {
      if (over === "ended") return;
      throw over;
    }
    await new Promise((resolve) => setTimeout(resolve, backoffMs(failures++)));
  }
}
