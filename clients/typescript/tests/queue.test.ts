import { afterAll, beforeAll, describe, expect, it } from "vitest";

import { type Job, RayQueue, RayQueueError, type WorkQueue } from "../src/index.js";
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

async function queue(settings: Parameters<RayQueue["createQueue"]>[1] = {}): Promise<WorkQueue> {
  const name = `queue-${(made += 1)}`;
  await rq.createQueue(name, { retryBackoffMs: 0, ...settings });
  return rq.queue(name);
}

async function one(of: WorkQueue, leaseMs = 0): Promise<Job> {
  const [job] = await of.get({ waitMs: 10_000, leaseMs });
  if (!job) throw new Error("no job came");
  return job;
}

async function failure(of: Promise<unknown>): Promise<RayQueueError> {
  const error: unknown = await of.then(
    () => null,
    (problem: unknown) => problem,
  );
  expect(error).toBeInstanceOf(RayQueueError);
  return error as RayQueueError;
}

async function until(holds: () => Promise<boolean>): Promise<void> {
  const deadline = Date.now() + 20_000;
  while (!(await holds())) {
    if (Date.now() > deadline) throw new Error("it did not come to hold");
    await new Promise((resolve) => setTimeout(resolve, 50));
  }
}

describe("a work queue", () => {
  it("gives out a job as it was put, and never again once it is acknowledged", async () => {
    const emails = await queue({ lanes: 2 });
    const put = await emails.put({ json: { to: "ann" }, key: "k", headers: { trace: "t1" }, priority: 1 });
    const job = await one(emails);
    expect([job.id, job.json(), job.keyText(), job.deliveries, job.priority]).toEqual([
      put.id,
      { to: "ann" },
      "k",
      1,
      1,
    ]);
    expect(job.headers).toEqual([["trace", new TextEncoder().encode("t1")]]);
    expect(await emails.size()).toEqual({ ready: 0, leased: 1, delayed: 0, dead: 0 });
    await job.ack();
    await job.ack(); // repeated, it is the same one
    expect(await emails.size()).toEqual({ ready: 0, leased: 0, delayed: 0, dead: 0 });
    expect(await emails.get({ waitMs: 0 })).toEqual([]);
  });

  it("delays, deduplicates, and puts once by an idempotency key", async () => {
    const tasks = await queue();
    await tasks.put({ value: "later", delayMs: 3_600_000 });
    await tasks.put({ value: "then", deliverAt: new Date(Date.now() + 3_600_000) });
    expect((await tasks.size()).delayed).toBe(2);
    const first = await tasks.put({ value: "a", dedupeId: "x" });
    expect(await tasks.put({ value: "b", dedupeId: "x" })).toEqual({ id: first.id, duplicate: true });
    const once = { idempotencyKey: "put-1" };
    const many = await tasks.putMany([{ value: "c" }, { value: "d" }], once);
    expect(await tasks.putMany([{ value: "c" }, { value: "d" }], once)).toEqual(many);
    expect((await tasks.size()).ready).toBe(3);
    expect((await failure(tasks.put({ value: "e", ttlMs: 0 }))).code).toBe("invalid_input");
  });

  it("tells what became of a job whose result is wanted", async () => {
    const tasks = await queue({ maxDeliveries: 1 });
    const asked = await tasks.put({ json: [6, 7], wantResult: true });
    expect((await tasks.result(asked.id, { waitMs: 0 })).state).toBe("pending");
    const waiting = tasks.result(asked.id, { waitMs: 20_000 });
    const job = await one(tasks);
    const [left, right] = job.json<[number, number]>();
    await job.ack({ json: left * right });
    await job.ack({ json: left * right }); // repeated, it is the same one
    const done = await waiting;
    expect([done.state, done.json()]).toEqual(["done", 42]);
    const empty = await tasks.put({ value: "a", wantResult: true });
    await (await one(tasks)).ack();
    expect((await tasks.result(empty.id)).value).toBeNull();
    const failing = await tasks.put({ value: "b", wantResult: true });
    await (await one(tasks)).reject("no such customer", { traceback: "line 1" });
    const dead = await tasks.result(failing.id);
    expect([dead.state, dead.reason, dead.traceback, dead.value]).toEqual(["dead", "no such customer", "line 1", null]);
    const plain = await tasks.put({ value: "nobody asks" });
    expect((await failure(tasks.result(plain.id))).code).toBe("unknown_job");
    await expect((await one(tasks)).ack({ json: 1, value: "1" })).rejects.toThrow(TypeError);
  });

  it("shows single jobs, and drops one that waits", async () => {
    const tasks = await queue();
    const [first, second] = await tasks.putMany([
      { value: "a", key: "k", wantResult: true },
      { value: "b", delayMs: 3_600_000 },
    ]);
    if (!first || !second) throw new Error("a short answer");
    expect((await tasks.peek()).map((each) => [each.id, each.text(), each.keyText(), each.deliveries])).toEqual([
      [first.id, "a", "k", 0],
    ]);
    expect(await tasks.state(first.id)).toEqual({ state: "ready", deliveries: 0 });
    expect((await tasks.state(second.id)).state).toBe("delayed");
    await tasks.cancel(second.id);
    expect((await failure(tasks.cancel(second.id))).code).toBe("unknown_job");
    expect((await tasks.state(second.id)).state).toBe("gone");
    await tasks.cancel(first.id);
    expect((await tasks.result(first.id)).state).toBe("cancelled");
    expect(await tasks.get({ waitMs: 0 })).toEqual([]);
  });

  it("tries again what failed, keeps what always fails, and redrives it", async () => {
    const tasks = await queue({ maxDeliveries: 2 });
    await tasks.put({ value: "a" });
    await (await one(tasks)).release();
    await (await one(tasks)).nack({ delayMs: 0, reason: "busy" });
    const again = await one(tasks);
    expect(again.deliveries).toBe(2);
    await again.nack({ reason: "still busy" });
    const [dead] = await tasks.dead();
    expect([dead?.reason, dead?.text(), dead?.history.map((each) => each.reason)]).toEqual([
      "still busy",
      "a",
      ["busy", "still busy"],
    ]);
    expect(await tasks.redrive([dead?.id ?? ""])).toBe(1);
    await (await one(tasks)).reject("no such customer", { traceback: "line 1" });
    expect((await tasks.dead())[0]?.history.at(-1)?.traceback).toBe("line 1");
    expect(await tasks.purge("all")).toBe(1);
    expect((await tasks.size()).dead).toBe(0);
  });

  it("is worked on by a loop, which gives back what it did not begin", async () => {
    const tasks = await queue({ partitions: 2 });
    await tasks.putMany(Array.from({ length: 50 }, (_, number) => ({ value: String(number) })));
    const done: string[] = [];
    for await (const job of tasks.jobs({ credit: 8 })) {
      done.push(job.text());
      await job.ack();
      if (done.length === 20) break;
    }
    await until(async () => (await tasks.size()).ready === 30);
    for await (const job of tasks.jobs()) {
      expect(job.deliveries).toBe(1);
      done.push(job.text());
      await job.ack();
      if (done.length === 50) break;
    }
    expect(new Set(done).size).toBe(50);
    await until(async () => (await tasks.size()).leased === 0);
  });

  it("gives back what was on its way when a loop was left", async () => {
    const tasks = await queue({ partitions: 2 });
    await tasks.putMany(Array.from({ length: 200 }, (_, number) => ({ value: String(number) })));
    for (let round = 0; round < 40; round += 1) {
      const held: Job[] = [];
      for await (const job of tasks.jobs({ credit: 6 })) {
        if (held.push(job) < 3) continue; // with the third one it asked for more
        await new Promise((resolve) => setTimeout(resolve, round % 4));
        break;
      }
      await Promise.all(held.map((job) => job.release()));
      await until(async () => (await tasks.size()).ready === 200);
    }
  }, 60_000);

  it("acknowledges many at once, and says which were lost", async () => {
    const tasks = await queue();
    await tasks.putMany([{ value: "a" }, { value: "b" }]);
    // Two clients: the second one's lease is nobody's to extend.
    const other = new RayQueue({ url: gateway.url });
    try {
      const [slow] = await other.queue(tasks.name).get({ leaseMs: 1, waitMs: 5000 });
      await until(async () => (await tasks.size()).ready === 2);
      const both = await tasks.get({ max: 2, waitMs: 5000 });
      expect(both.length).toBe(2);
      expect((await failure(slow?.ack() ?? Promise.resolve())).code).toBe("lease_lost");
      expect(slow?.lost).toBe(true);
      await Promise.all(both.map((job) => job.ack()));
      expect(await tasks.size()).toEqual({ ready: 0, leased: 0, delayed: 0, dead: 0 });
    } finally {
      other.close();
    }
  });

  it("keeps a job for as long as the program holds it", async () => {
    const tasks = await queue();
    await tasks.put({ value: "long" });
    const job = await one(tasks, 4000);
    const begin = Date.now();
    while (Date.now() - begin < 6000) {
      expect((await tasks.size()).leased).toBe(1);
      await new Promise((resolve) => setTimeout(resolve, 250));
    }
    expect(await job.extend(60_000)).toBeGreaterThan(30_000);
    await job.ack();
    expect(job.deliveries).toBe(1);
  }, 30_000);

  it("goes on when its gateway ends: nothing that was put is lost, every ack counts", async () => {
    const tasks = await queue({ partitions: 2 });
    const put = new Set<string>();
    for (let number = 0; number < 40; number += 1)
      put.add((await tasks.put({ value: String(number), dedupeId: `d${number}` })).id);
    const done = new Set<string>();
    for await (const job of tasks.jobs({ credit: 4, leaseMs: 5000 })) {
      if (done.size === 10) await gateway.tell("restart");
      await job.ack();
      expect(done.has(job.id)).toBe(false);
      done.add(job.id);
      if (done.size === put.size) break;
    }
    expect(done).toEqual(put);
    expect(await tasks.size()).toEqual({ ready: 0, leased: 0, delayed: 0, dead: 0 });
  }, 60_000);

  it("refuses what is no queue", async () => {
    await rq.createTopic("a-log");
    expect((await failure(rq.queue("a-log").put({ value: "x" }))).code).toBe("topic_kind");
    expect((await failure(rq.queue("nobody").get())).code).toBe("unknown_topic");
    expect((await failure(rq.queue("a-log").jobs().next())).code).toBe("topic_kind");
    const aborted = rq.queue("a-log").jobs({ signal: AbortSignal.abort() });
    expect(await aborted.next()).toEqual({ done: true, value: undefined });
  });
});
