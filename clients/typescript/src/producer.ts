/**
 * A producer: one stream to a gateway; what waits to be sent goes as one batch. Each record's promise is kept once the
 * record is on the disks of a majority. If the stream breaks, what was under way is *unknown*, and its promises say so;
 * nothing is sent twice by itself (`RayQueue.append` with an idempotency key is for that). What was not sent waits for
 * another stream, which is opened with a back-off, and for half a minute at most: then nobody is there.
 */

import { create } from "@bufbuild/protobuf";
import type { Client } from "@connectrpc/connect";

import { RayQueueError } from "./errors.js";
import type { NewRecord as WireNewRecord } from "./gen/rayqueue/v1/common_pb.js";
import { type ProduceRequest, ProduceRequestSchema, type RecordService } from "./gen/rayqueue/v1/records_pb.js";
import { type NewRecord, toWire, type Written } from "./records.js";

const BATCH_RECORDS = 1000;
const BATCH_BYTES = 1024 * 1024;
const UNDER_WAY = 64;
const FIRST_PAUSE_MS = 50;
const LONGEST_PAUSE_MS = 2000;
const AWAY_MS = 30_000;
/** Told before anything of a stream is looked at; later they are told batch by batch. */
const REFUSED = new Set(["unauthenticated", "permission_denied"]);

interface Waiting {
  record: WireNewRecord;
  resolve: (written: Written) => void;
  reject: (error: unknown) => void;
}

/** One life of the stream: another one after it broke. */
interface Stream {
  under: Map<bigint, Waiting[]>;
  abort: AbortController;
  wake: () => void;
  done: Promise<void>;
  answered: boolean;
}

export class Producer {
  readonly #waiting: Waiting[] = [];
  #stream: Stream | null = null;
  #number = 0n;
  #closed = false;
  #room: (() => void)[] = [];
  /** Streams in a row that broke without an answer, and since when. */
  #failures = 0;
  #failingSince = 0;

  constructor(
    private readonly client: Client<typeof RecordService>,
    readonly topic: string,
    private readonly maxWaiting: number,
  ) {}

  /** Waits while `maxWaiting` records wait already. Rejects with a `RayQueueError`. */
  async send(record: NewRecord): Promise<Written> {
    const wire = toWire(record);
    while (this.#waiting.length >= this.maxWaiting && !this.#closed)
      await new Promise<void>((go) => this.#room.push(go));
    if (this.#closed) throw new RayQueueError("this producer is closed", "closed", false);
    return await new Promise<Written>((resolve, reject) => {
      this.#waiting.push({ record: wire, resolve, reject });
      this.#stream ??= this.#open();
      this.#stream.wake();
    });
  }

  /** What was sent is answered first, or rejected. */
  async close(): Promise<void> {
    this.#closed = true;
    this.#letIn();
    this.#stream?.wake();
    await this.#stream?.done;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.close();
  }

  #open(): Stream {
    const stream: Stream = {
      under: new Map(),
      abort: new AbortController(),
      wake: () => undefined,
      done: Promise.resolve(),
      answered: false,
    };
    stream.done = this.#run(stream);
    return stream;
  }

  async #run(stream: Stream): Promise<void> {
    let problem: RayQueueError | null = null;
    try {
      if (this.#failures > 0) await pause(this.#failures);
      for await (const answer of this.client.produce(this.#requests(stream), { signal: stream.abort.signal })) {
        const batch = stream.under.get(answer.number) ?? [];
        stream.under.delete(answer.number);
        stream.answered = true;
        this.#failures = 0;
        stream.wake();
        const failed = answer.problem ? RayQueueError.ofProblem(answer.problem) : null;
        batch.forEach((each, row) => {
          const written = answer.records[row];
          if (failed || !written) each.reject(failed ?? new RayQueueError("a short answer", "outcome_unknown", true));
          else
            each.resolve({
              partition: written.partition,
              offset: written.offset,
              timestampMs: Number(written.timestampMs),
            });
        });
      }
    } catch (error) {
      problem = RayQueueError.of(error);
    }
    if (this.#stream === stream) this.#stream = null;
    stream.abort.abort();
    stream.wake();
    const refused = problem !== null && !stream.answered && REFUSED.has(problem.code);
    const unknown = refused
      ? problem
      : new RayQueueError(`the stream broke: ${problem?.message ?? "the gateway ended it"}`, "outcome_unknown", true, {
          cause: problem,
        });
    for (const batch of stream.under.values()) for (const each of batch) each.reject(unknown);
    stream.under.clear();
    if (problem && !stream.answered && this.#failures++ === 0) this.#failingSince = Date.now();
    if (this.#waiting.length === 0) return;
    const away = this.#failures > 0 && Date.now() - this.#failingSince > AWAY_MS;
    if (problem?.retriable === false || away || this.#closed) {
      // These were not sent.
      const why = problem ?? new RayQueueError("the gateway ended the stream", "closed", true);
      for (const each of this.#waiting.splice(0)) each.reject(why);
      this.#letIn();
    } else this.#stream ??= this.#open(); // another stream takes them
  }

  async *#requests(stream: Stream): AsyncGenerator<ProduceRequest> {
    let topic = this.topic;
    while (!stream.abort.signal.aborted) {
      if (this.#waiting.length === 0 && this.#closed) return;
      if (this.#waiting.length === 0 || stream.under.size >= UNDER_WAY) {
        await new Promise<void>((resolve) => (stream.wake = resolve));
        continue;
      }
      // The rest of this turn of the event loop may have more for the batch.
      await new Promise<void>((resolve) => setImmediate(resolve));
      const batch = this.#take();
      const number = this.#number++;
      stream.under.set(number, batch);
      yield create(ProduceRequestSchema, { number, topic, records: batch.map((each) => each.record) });
      topic = ""; // the topic of the request before
    }
  }

  #take(): Waiting[] {
    let size = 0;
    let count = 0;
    for (const { record } of this.#waiting) {
      size += (record.value?.length ?? 0) + (record.key?.length ?? 0) + 64;
      if (count > 0 && (size > BATCH_BYTES || count >= BATCH_RECORDS)) break;
      count += 1;
    }
    const batch = this.#waiting.splice(0, count);
    this.#letIn();
    return batch;
  }

  #letIn(): void {
    for (const go of this.#room.splice(0)) go();
  }
}

/** Longer each time, and never quite the same: many producers miss one gateway at once. */
async function pause(failures: number): Promise<void> {
  const most = Math.min(LONGEST_PAUSE_MS, FIRST_PAUSE_MS * 2 ** Math.min(failures - 1, 10));
  await new Promise((resolve) => setTimeout(resolve, most * (0.5 + Math.random() / 2)));
}
