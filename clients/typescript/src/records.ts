/** Records as programs have them, and as the wire does. */

import { create } from "@bufbuild/protobuf";

import {
  Isolation as WireIsolation,
  NewRecordSchema,
  type NewRecord as WireNewRecord,
  type Record as WireRecord,
} from "./gen/rayqueue/v1/common_pb.js";

export type Bytes = Uint8Array | string;

/** Of transactions: only what is committed, or everything. Left out: what is committed. */
export type Isolation = "read_committed" | "read_uncommitted";

export function isolationOf(isolation: Isolation | undefined): WireIsolation {
  if (isolation === undefined) return WireIsolation.UNSPECIFIED;
  return isolation === "read_committed" ? WireIsolation.READ_COMMITTED : WireIsolation.READ_UNCOMMITTED;
}

/** What is written. Texts are stored as UTF-8. Of `value` and `json` one; none: it has no value. */
export interface NewContents {
  value?: Bytes | null;
  /** Anything that JSON can say. */
  json?: unknown;
  key?: Bytes | null;
  headers?: globalThis.Record<string, Bytes>;
}

/** A record to be written. Those of one key keep their order. */
export interface NewRecord extends NewContents {
  /** A lane of the topic: the highest is read first. */
  priority?: number;
  partition?: number;
  /** Milliseconds since 1970; now, if it is left out. */
  timestampMs?: number;
}

/** Where a record is: on the disks of a majority. */
export interface Written {
  partition: number;
  offset: bigint;
  timestampMs: number;
}

const encoder = new TextEncoder();
const decoder = new TextDecoder("utf-8", { fatal: true });
const bytes = (value: Bytes): Uint8Array<ArrayBuffer> =>
  (typeof value === "string" ? encoder.encode(value) : value) as Uint8Array<ArrayBuffer>;

/** The bytes of a value, if there is one. */
export function toValue(given: { value?: Bytes | null; json?: unknown }): Uint8Array<ArrayBuffer> | undefined {
  if (given.json !== undefined && given.value != null) throw new TypeError("a record has one of value and json");
  if (given.json !== undefined) return bytes(JSON.stringify(given.json));
  return given.value == null ? undefined : bytes(given.value);
}

export function toWire(record: NewRecord): WireNewRecord {
  const made = create(NewRecordSchema, { priority: record.priority ?? 0 });
  const value = toValue(record);
  if (value !== undefined) made.value = value;
  if (record.key != null) made.key = bytes(record.key);
  if (record.partition !== undefined) made.partition = record.partition;
  if (record.timestampMs !== undefined) made.timestampMs = BigInt(record.timestampMs);
  for (const [name, value] of Object.entries(record.headers ?? {}))
    made.headers.push({ $typeName: "rayqueue.v1.Header", name, value: bytes(value) });
  return made;
}

/** Value, key and headers of what was read. */
export class Contents {
  readonly value: Uint8Array | null;
  readonly key: Uint8Array | null;
  /** In their order; a name may be there twice. */
  readonly headers: readonly (readonly [name: string, value: Uint8Array])[];

  constructor(wire: Pick<WireRecord, "value" | "key" | "headers">) {
    this.value = wire.value ?? null;
    this.key = wire.key ?? null;
    this.headers = wire.headers.map((each) => [each.name, each.value] as const);
  }

  /** The value as text; a `TypeError` if it is not UTF-8. */
  text(): string {
    return decoder.decode(this.value ?? new Uint8Array());
  }

  /** The value as JSON says it. The type is the caller's word: nothing checks it. */
  json<T = unknown>(): T {
    return JSON.parse(this.text()) as T;
  }

  keyText(): string | null {
    return this.key === null ? null : decoder.decode(this.key);
  }
}

/** A record that was read. */
export class QueueRecord extends Contents {
  readonly topic: string;
  readonly partition: number;
  readonly offset: bigint;
  readonly lane: number;
  readonly timestampMs: number;

  constructor(wire: WireRecord) {
    super(wire);
    this.topic = wire.topic;
    this.partition = wire.partition;
    this.offset = wire.offset;
    this.lane = wire.lane;
    this.timestampMs = Number(wire.timestampMs);
  }
}
