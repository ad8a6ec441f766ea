import { afterAll, beforeAll, describe, expect, it } from "vitest";

import { QueueRecord, RayQueue, RayQueueError, type ReceivedRecord } from "../src/index.js";
import { Gateway } from "./gateway.js";

let gateway: Gateway;
let rq: RayQueue;
let made = 0;

beforeAll(async () => {
  gateway = await Gateway.start();
  rq = new RayQueue({ url: gateway.url });
});

afterAll(async () => {
  rq.close();
  await gateway.stop();
});

async function topic(partitions = 1, lanes = 1): Promise<string> {
  const name = `topic-${(made += 1)}`;
  await rq.createTopic(name, { partitions, lanes });
  return name;
}

async function failure(of: Promise<unknown>): Promise<RayQueueError> {
  const error: unknown = await of.then(
    () => null,
    (problem: unknown) => problem,
  );
  expect(error).toBeInstanceOf(RayQueueError);
  return error as RayQueueError;
}

async function take(records: AsyncIterable<ReceivedRecord>, count: number, ack: boolean): Promise<ReceivedRecord[]> {
  const taken: ReceivedRecord[] = [];
  for await (const record of records) {
    taken.push(record);
    if (ack) await record.ack();
    if (taken.length === count) break;
  }
  return taken;
}

describe("append and fetch", () => {
  it("reads what is committed, unless it is told to read everything", async () => {
    const name = await topic();
    await gateway.tell(`transactions ${name}`);
    const everything = ["aborted", "committed"];
    for (const [isolation, wanted] of [
      [undefined, ["committed"]],
      ["read_committed", ["committed"]],
      ["read_uncommitted", everything],
    ] as const) {
      const chosen = isolation === undefined ? {} : { isolation };
      const fetched: string[] = [];
      for await (const record of rq.fetch(name, { partition: 0, offset: 0, ...chosen }))
        if (fetched.push(record.text()) === wanted.length) break;
      expect(fetched).toEqual(wanted);
      const subscribed = rq.subscribe({ group: `${name}-${isolation ?? "none"}`, topics: [name], ...chosen });
      expect((await take(subscribed, wanted.length, true)).map((each) => each.text())).toEqual(wanted);
    }
  });

  it("keeps keys, values, headers, times and their absence", async () => {
    const name = await topic();
    const written = await rq.append(name, [
      {
        json: { order: 17 },
        key: "customer-4",
        headers: { trace: "a1", raw: new Uint8Array([0, 255]) },
        timestampMs: 1_763_460_000_123,
      },
      { value: new Uint8Array([0, 1, 255]) },
      { key: "gone", value: null },
      { value: "" },
    ]);
    const log: QueueRecord[] = [];
    for await (const record of rq.fetch(name, { partition: 0, offset: 0 })) if (log.push(record) === 4) break;
    // Records with and without keys may be written in another order; each is where its answer says.
    const read = written.map((each) => log[Number(each.offset)]);
    expect(read[0]?.json()).toEqual({ order: 17 });
    expect(read[0]?.keyText()).toBe("customer-4");
    expect(read[0]?.timestampMs).toBe(1_763_460_000_123);
    expect(read[0]?.headers).toEqual([
      ["trace", new TextEncoder().encode("a1")],
      ["raw", new Uint8Array([0, 255])],
    ]);
    expect(read[1]?.value).toEqual(new Uint8Array([0, 1, 255]));
    expect(() => read[1]?.text()).toThrow(TypeError);
    expect(read[2]?.value).toBeNull();
    expect(read[3]?.value).toEqual(new Uint8Array());
  });

  it("writes once what is asked twice with one idempotency key", async () => {
    const name = await topic();
    const first = await rq.append(name, [{ value: "pay" }], { idempotencyKey: "payment-1" });
    const second = await rq.append(name, [{ value: "pay" }], { idempotencyKey: "payment-1" });
    expect(second).toEqual(first);
    const { records } = await rq.admin.describeTopic({ name });
    expect(records).toBe(1n);
  });

  it("tells errors by their codes", async () => {
    expect(await failure(rq.append("missing", [{ value: "x" }]))).toMatchObject({
      code: "unknown_topic",
      retriable: false,
    });
    const name = await topic();
    expect(await failure(rq.append(name, [{ value: "x", partition: 7 }]))).toMatchObject({ code: "unknown_partition" });
    expect(await failure(rq.createTopic(name))).toMatchObject({ code: "topic_exists" });
    await rq.createTopic(name, {}, { ifMissing: true });
    await expect(rq.append(name, [{ value: "x", json: 1 }])).rejects.toThrow(TypeError);
  });
});

describe("Producer", () => {
  it("keeps the order, in batches, and answers each record with its place", async () => {
    const name = await topic();
    const producer = rq.producer(name, { maxWaiting: 500 });
    const sent = Array.from({ length: 5000 }, (_, i) => producer.send({ value: String(i) }));
    const written = await Promise.all(sent);
    await producer.close();
    expect(written.map((each) => Number(each.offset))).toEqual(Array.from({ length: 5000 }, (_, i) => i));
    let next = 0;
    for await (const record of rq.fetch(name, { partition: 0, offset: 0 })) {
      expect(record.text()).toBe(String(next));
      if ((next += 1) === 5000) break;
    }
    expect(await failure(producer.send({ value: "late" }))).toMatchObject({ code: "closed" });
  });

  it("fails the batch that is wrong, and goes on", async () => {
    const name = await topic();
    const producer = rq.producer(name);
    expect(await failure(producer.send({ value: "x", partition: 99 }))).toMatchObject({ code: "unknown_partition" });
    expect((await producer.send({ value: "y" })).offset).toBe(0n);
    await producer.close();
  });

  it("says that an outcome is unknown when the stream breaks, and sends again afterwards", async () => {
    const name = await topic();
    const producer = rq.producer(name);
    await producer.send({ value: "before" });
    await gateway.tell("restart");
    let failures = 0;
    for (;;) {
      try {
        await producer.send({ value: "after" });
        break;
      } catch (error) {
        expect(error).toMatchObject({ retriable: true });
        if ((failures += 1) > 100) throw error;
        await new Promise((resolve) => setTimeout(resolve, 100));
      }
    }
    await producer.close();
    const { records } = await rq.admin.describeTopic({ name });
    expect(Number(records)).toBeGreaterThanOrEqual(2);
  });
});

describe("subscribe", () => {
  it("reads as a group: what is acknowledged is not read again, the rest is", async () => {
    const name = await topic();
    await rq.append(
      name,
      Array.from({ length: 10 }, (_, i) => ({ value: String(i) })),
    );
    const options = { group: `${name}-group`, topics: [name] };
    const first = await take(rq.subscribe(options), 4, true);
    expect(first.map((each) => each.text())).toEqual(["0", "1", "2", "3"]);
    const unacknowledged = await take(rq.subscribe(options), 3, false);
    expect(unacknowledged.map((each) => each.text())).toEqual(["4", "5", "6"]);
    const again = await take(rq.subscribe(options), 6, true);
    expect(again.map((each) => each.text())).toEqual(["4", "5", "6", "7", "8", "9"]);
    expect(await failure(unacknowledged[0]?.ack() ?? Promise.resolve())).toMatchObject({ code: "session_gone" });
    const { lag } = await rq.admin.describeGroup({ group: options.group });
    expect(lag).toBe(0n);
  });

  it("reads more than its credit, and acknowledges without waiting for each", async () => {
    const name = await topic(2);
    await rq.append(
      name,
      Array.from({ length: 2000 }, (_, i) => ({ value: String(i), key: String(i % 7) })),
    );
    const seen = new Set<string>();
    const acks: Promise<void>[] = [];
    for await (const record of rq.subscribe({ group: `${name}-group`, topics: [name], credit: 64 })) {
      seen.add(record.text());
      acks.push(record.ack());
      if (seen.size === 2000) break;
    }
    await Promise.all(acks);
    const { lag } = await rq.admin.describeGroup({ group: `${name}-group` });
    expect(lag).toBe(0n);
  });

  it("reads the highest lane first", async () => {
    const name = await topic(1, 3);
    await rq.append(name, [{ value: "door" }, { value: "smoke", priority: 2 }, { value: "battery", priority: 1 }]);
    const read = await take(rq.subscribe({ group: `${name}-group`, topics: [name] }), 3, true);
    expect(read.map((each) => each.text())).toEqual(["smoke", "battery", "door"]);
  });

  it("goes on after the gateway was started again: nothing is missed", async () => {
    const name = await topic();
    await rq.append(name, [{ value: "0" }, { value: "1" }]);
    const seen: string[] = [];
    for await (const record of rq.subscribe({ group: `${name}-group`, topics: [name] })) {
      seen.push(record.text());
      await record.ack().catch(() => undefined); // of the session before: it comes again
      if (seen.length === 2) {
        await gateway.tell("restart");
        await rq.append(name, [{ value: "2" }], { idempotencyKey: `${name}-2` });
      }
      if (record.text() === "2") break;
    }
    expect([...new Set(seen)]).toEqual(["0", "1", "2"]);
  });

  it("ends when it is aborted, and throws what cannot be mended", async () => {
    const name = await topic();
    const abort = new AbortController();
    const reading = (async () => {
      for await (const record of rq.subscribe({ group: `${name}-group`, topics: [name], signal: abort.signal }))
        void record;
    })();
    setTimeout(() => abort.abort(), 300);
    await reading;
    expect(await failure(take(rq.subscribe({ group: "g", topics: [] }), 1, false))).toMatchObject({
      code: "invalid_input",
      retriable: false,
    });
  });
});

// The last: as soon as a key exists, nobody is let in without one.
describe("keys", () => {
  it("are asked for, and let nobody do more than they grant", async () => {
    const name = await topic();
    const { key } = await gateway.tell(`key publish:topic:${name}`);
    await expect
      .poll(() => rq.append(name, [{ value: "x" }]).catch((error: RayQueueError) => error.code), { timeout: 15_000 })
      .toBe("unauthenticated");
    const mine = new RayQueue({ url: gateway.url, key: String(key) });
    expect(await mine.append(name, [{ value: "x" }])).toHaveLength(1);
    expect(await failure(mine.deleteTopic(name))).toMatchObject({ code: "permission_denied", retriable: false });
    const producer = mine.producer("other");
    expect((await failure(producer.send({ value: "x" }))).code).toBe("permission_denied");
    await producer.close();
    mine.close();
  });
});
