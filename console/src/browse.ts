/** Records found: read page by page from every partition asked for, until enough match or enough was looked at. */

import { api, path, query } from "./api";
import type { Match } from "./values";
import type { Partition, RecordOut } from "./types";

export const LOOKED_AT_MOST = 20_000;
const PAGE = 500;

export interface Search {
  topic: string;
  partitions: Partition[];
  from: { kind: "newest" } | { kind: "oldest" } | { kind: "offset"; offset: number } | { kind: "time"; at_ms: number };
  match: Match;
  /** Whether everything matches: then no more is read than shown. */
  all: boolean;
  wanted: number;
}

export interface Found {
  records: RecordOut[];
  looked: number;
  /** Why no more was looked at. */
  end: "enough" | "end" | "limit";
}

export async function browse(search: Search, abort: AbortSignal): Promise<Found> {
  const each = Math.max(1, Math.floor(LOOKED_AT_MOST / search.partitions.length));
  const parts = await Promise.all(
    search.partitions.map((partition) =>
      search.from.kind === "newest"
        ? backwards(search, partition, each, abort)
        : forwards(search, partition, each, abort),
    ),
  );
  const newest = search.from.kind === "newest";
  const found = parts.flatMap((part) => part.records);
  found.sort(
    (a, b) => (a.timestamp_ms - b.timestamp_ms || a.partition - b.partition || a.offset - b.offset) * (newest ? -1 : 1),
  );
  const records = found.slice(0, search.wanted);
  const looked = parts.reduce((sum, part) => sum + part.looked, 0);
  const end = found.length >= search.wanted ? "enough" : parts.some((part) => part.end === "limit") ? "limit" : "end";
  return { records, looked, end };
}

async function page(
  topic: string,
  partition: number,
  at: Record<string, number>,
  max: number,
  abort: AbortSignal,
): Promise<RecordOut[]> {
  // As text: a number that JavaScript cannot hold keeps its digits.
  const params = query({ partition, ...at, max, format: "text" });
  return (await api.get<{ records: RecordOut[] }>(path`/v1/topics/${topic}/records` + params, abort)).records;
}

async function forwards(search: Search, partition: Partition, most: number, abort: AbortSignal): Promise<Found> {
  const { from } = search;
  let at: Record<string, number> =
    from.kind === "time"
      ? { timestamp_ms: from.at_ms }
      : { offset: Math.max(partition.start_offset, from.kind === "offset" ? from.offset : 0) };
  const records: RecordOut[] = [];
  let looked = 0;
  while (looked < most) {
    if ("offset" in at && (at["offset"] as number) >= partition.end_offset) return { records, looked, end: "end" };
    const got = await page(search.topic, partition.number, at, search.all ? search.wanted : PAGE, abort);
    const last = got.at(-1);
    if (!last) return { records, looked, end: "end" };
    looked += got.length;
    records.push(...got.filter(search.match));
    if (records.length >= search.wanted) return { records: records.slice(0, search.wanted), looked, end: "enough" };
    at = { offset: last.offset + 1 };
  }
  return { records, looked, end: "limit" };
}

async function backwards(search: Search, partition: Partition, most: number, abort: AbortSignal): Promise<Found> {
  let end = partition.end_offset;
  let records: RecordOut[] = [];
  let looked = 0;
  const size = search.all ? search.wanted : PAGE;
  while (end > partition.start_offset && looked < most) {
    const start = Math.max(partition.start_offset, end - size);
    // Compaction and transactions leave holes: a page may reach past its end, and what was seen already is left out.
    const got = (await page(search.topic, partition.number, { offset: start }, end - start, abort)).filter(
      (each) => each.offset < end,
    );
    looked += end - start;
    records = [...got.filter(search.match), ...records];
    if (records.length >= search.wanted) return { records: records.slice(-search.wanted), looked, end: "enough" };
    end = start;
  }
  return { records, looked, end: end <= partition.start_offset ? "end" : "limit" };
}
