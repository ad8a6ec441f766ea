/** REST as Node's own fetch speaks it: the contract, without a client of ours. */

import { afterAll, beforeAll, describe, expect, it } from "vitest";

import { Gateway } from "./gateway.js";

let gateway: Gateway;

beforeAll(async () => {
  gateway = await Gateway.start();
});

afterAll(async () => {
  await gateway.stop();
});

async function ask(
  method: string,
  path: string,
  body?: unknown,
  headers: Record<string, string> = {},
): Promise<{ status: number; kind: string | null; told: Record<string, unknown> }> {
  const sent = body === undefined ? {} : { body: JSON.stringify(body) };
  const answer = await fetch(`${gateway.restUrl}${path}`, {
    method,
    headers: { ...(body === undefined ? {} : { "content-type": "application/json" }), ...headers },
    ...sent,
  });
  const text = await answer.text();
  const told = text ? (JSON.parse(text) as Record<string, unknown>) : {};
  return { status: answer.status, kind: answer.headers.get("content-type"), told };
}

describe("REST", () => {
  it("publishes, reads as a group and acknowledges", async () => {
    expect((await ask("POST", "/v1/topics", { name: "orders", partitions: 2 })).status).toBe(201);
    const records = [{ value: { order: 1 }, key: "ann" }, { text: "tea" }, { base64: "AAH/" }];
    const once = { "Idempotency-Key": "from-node" };
    const first = await ask("POST", "/v1/topics/orders/records", { records }, once);
    expect(first.status).toBe(200);
    expect((await ask("POST", "/v1/topics/orders/records", { records }, once)).told).toEqual(first.told);
    const opened = await ask("POST", "/v1/groups/node/sessions", { topics: ["orders"], start: "earliest" });
    expect(opened.status).toBe(201);
    const session = `/v1/sessions/${String(opened.told["session"])}`;
    const read: Record<string, unknown>[] = [];
    let cursor = 0;
    for (let i = 0; i < 20 && read.length < 3; i += 1) {
      const { told } = await ask("GET", `${session}/records?wait_ms=500&cursor=${cursor}`);
      read.push(...(told["records"] as Record<string, unknown>[]));
      cursor = told["cursor"] as number;
    }
    expect(read.map((each) => each["value"] ?? each["text"] ?? each["base64"])).toEqual(
      expect.arrayContaining([{ order: 1 }, "tea", "AAH/"]),
    );
    expect(read).toHaveLength(3);
    expect((await ask("POST", `${session}/ack`, { through: cursor })).told).toEqual({ acknowledged: 3 });
    expect((await ask("GET", "/v1/groups/node")).told["lag"]).toBe(0);
    expect((await ask("DELETE", session)).status).toBe(204);
  });

  it("tells what is wrong as a problem with a code", async () => {
    const { status, kind, told } = await ask("GET", "/v1/topics/nothing");
    expect(status).toBe(404);
    expect(kind).toBe("application/problem+json");
    expect(told).toMatchObject({ status: 404, code: "unknown_topic" });
    expect((await ask("POST", "/v1/topics", { nmae: "x" })).told).toMatchObject({ status: 400, code: "invalid_input" });
  });

  it("follows a topic by server-sent events, and goes on behind the last one", async () => {
    expect((await ask("POST", "/v1/topics", { name: "tailed" })).status).toBe(201);
    const seen: unknown[] = [];
    let last = "";
    for (const wanted of [1, 2]) {
      await ask("POST", "/v1/topics/tailed/records", { records: [{ value: wanted }] });
      const stop = new AbortController();
      const path = `${gateway.restUrl}/v1/topics/tailed/tail?start=earliest`;
      const headers: Record<string, string> = last ? { "last-event-id": last } : {};
      const answer = await fetch(path, { headers, signal: stop.signal });
      let text = "";
      for await (const part of answer.body as ReadableStream<Uint8Array>) {
        text += new TextDecoder().decode(part);
        if (/^data: .*\n\n/m.test(text)) break;
      }
      stop.abort();
      last = /^id: (.*)$/m.exec(text)?.[1] ?? "";
      for (const [, data] of text.matchAll(/^data: (.*)$/gm))
        seen.push((JSON.parse(data ?? "") as { value: unknown }).value);
    }
    expect(seen).toEqual([1, 2]);
  });
});
