import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import { World } from "../fixtures/world";
import { api, ApiError, EventParser, hasKey, keyWanted, path, query, setKey } from "../src/api";
import { browse, type Search } from "../src/browse";
import { look } from "../src/live";
import { recordBody } from "../src/pages/publish";
import { difference, resetBody } from "../src/pages/reset";
import type { Partition } from "../src/types";

let world: World;
let without: string[] = [];

beforeEach(() => {
  world = new World(() => 1_763_460_000_000);
  without = [];
  vi.stubGlobal("fetch", (url: string, options: RequestInit) => {
    const key = new Headers(options.headers).get("Authorization")?.replace("Bearer ", "") ?? null;
    const [status, body] = without.some((each) => url.startsWith(each))
      ? [404, { code: "unknown_route", title: "There is no such route", detail: "" }]
      : world.answer(options.method ?? "GET", url, options.body ? JSON.parse(String(options.body)) : null, key);
    return Promise.resolve(new Response(body === null ? null : JSON.stringify(body), { status }));
  });
});

afterEach(() => {
  setKey("");
  vi.unstubAllGlobals();
});

describe("the gateway, asked", () => {
  it("escapes names", () => {
    expect(path`/v1/topics/${"a/b?c"}/records` + query({ offset: 0, partition: null })).toBe(
      "/v1/topics/a%2Fb%3Fc/records?offset=0",
    );
  });

  it("tells problems in the gateway's words", async () => {
    const error: unknown = await api.get("/v1/topics/nothing").catch((problem: unknown) => problem);
    expect(error).toBeInstanceOf(ApiError);
    expect(error).toMatchObject({
      status: 404,
      code: "unknown_topic",
      missing: false,
      detail: "there is no topic 'nothing'",
    });
  });

  it("wants a key where one is needed, and keeps it in this tab only", async () => {
    world = new World(Date.now, "rq_secret");
    await expect(api.get("/v1/overview")).rejects.toMatchObject({ status: 401 });
    expect(keyWanted.value).toBe(true);
    setKey(" rq_secret ");
    expect(keyWanted.value).toBe(false);
    await api.get("/v1/overview");
    expect(sessionStorage.getItem("rayqueue.key")).toBe("rq_secret");
    expect(localStorage.length).toBe(0);
    setKey("");
    expect(hasKey()).toBe(false);
    expect(sessionStorage.length).toBe(0);
  });

  it("reads events that come in pieces", () => {
    const parser = new EventParser();
    expect(parser.feed(": nothing new\n\nid: 0-1\nevent: rec")).toEqual([]);
    expect(parser.feed('ord\ndata: {"a":1}\n')).toEqual([]);
    expect(parser.feed("\nevent: error\ndata: {}\n\n")).toEqual([
      { event: "record", data: '{"a":1}' },
      { event: "error", data: "{}" },
    ]);
  });
});

describe("browse", () => {
  const partition = (number: number): Partition => world.overview().topics[0]?.partitions[number] as Partition;
  const search = (more: Partial<Search>): Search => ({
    topic: "orders",
    partitions: [partition(0), partition(1)],
    from: { kind: "newest" },
    match: () => true,
    all: true,
    wanted: 20,
    ...more,
  });
  const abort = new AbortController().signal;

  it("reads backwards from the end, of all partitions, in the order of time", async () => {
    const found = await browse(search({}), abort);
    expect(found.records).toHaveLength(20);
    expect(found.records[0]?.offset).toBe(partition(0).end_offset - 1);
    const times = found.records.map((each) => each.timestamp_ms);
    expect(times).toEqual([...times].sort((a, b) => b - a));
  });

  it("reads on from an offset", async () => {
    const found = await browse(search({ from: { kind: "offset", offset: 500 }, partitions: [partition(0)] }), abort);
    expect(found.records.map((each) => each.offset)).toEqual(Array.from({ length: 20 }, (_, i) => 500 + i));
  });

  it("looks page by page for what matches, and says when it gives up", async () => {
    const rare = await browse(
      search({
        from: { kind: "oldest" },
        partitions: [partition(0)],
        all: false,
        match: (each) => each.offset === 1700,
      }),
      abort,
    );
    expect(rare.records.map((each) => each.offset)).toEqual([1700]);
    expect(rare.end).toBe("limit");
    expect(rare.looked).toBe(20_000);
  });

  it("sees every record once up to the beginning", async () => {
    world.topics.clear();
    world.add("orders", 1, 0, 1234);
    const found = await browse(
      search({ partitions: [partition(0)], all: false, wanted: 5000, match: () => true }),
      abort,
    );
    expect(new Set(found.records.map((each) => each.offset)).size).toBe(1234);
    expect(found.records).toHaveLength(1234);
    expect(found.end).toBe("end");
  });
});

describe("what is sent", () => {
  it("is JSON as it was typed", () => {
    expect(recordBody("json", '{"n": 12345678901234567890}', "k", "trace: a:b\n")).toEqual({
      text: '{"n": 12345678901234567890}',
      key: "k",
      headers: { trace: "a:b" },
    });
    expect(() => recordBody("json", "{", "", "")).toThrow("not JSON");
    expect(() => recordBody("text", "", "", "no colon")).toThrow("header");
    expect(recordBody("none", "x", "", "")).toEqual({});
  });

  it("is a reset that says one thing", () => {
    expect(resetBody("earliest", "", "orders")).toEqual({ to: "earliest", topic: "orders" });
    expect(resetBody("by", "-50", "")).toEqual({ by: -50 });
    expect(resetBody("offset", "7", "")).toEqual({ to: 7 });
    expect(() => resetBody("offset", "7.5", "")).toThrow("whole");
    expect(() => resetBody("time", "", "")).toThrow("day");
    expect(difference({ topic: "t", partition: 0, before: {}, after: { 0: 0 }, start: 0, end: 9, note: "" })).toBe(0);
    expect(
      difference({ topic: "t", partition: 0, before: { 0: 9 }, after: { 0: 2 }, start: 0, end: 9, note: "" }),
    ).toBe(7);
  });
});

describe("look", () => {
  it("asks once if the gateway answers for everything", async () => {
    const found = await look(new AbortController().signal);
    expect(found.topics.map((each) => each.name)).toContain("orders");
  });
});
