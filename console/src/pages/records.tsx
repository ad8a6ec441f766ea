/** Records, looked at: by offset, time, key and filter; or followed as they come. */

import { useEffect, useRef, useState } from "preact/hooks";

import { api, ApiError, events, path, query } from "../api";
import { browse, type Found, type Search } from "../browse";
import { bytes, count, plural, time } from "../format";
import { Card, Empty, Failure, Field, Loading } from "../parts/basics";
import { place } from "../router";
import type { RecordOut, TopicDetail } from "../types";
import { bytesOf, filter, type Form, preview, show } from "../values";

const WANTED = 100;
const KEPT = 500;

type From = "newest" | "oldest" | "offset" | "time";

export function Records({ topic }: { topic: TopicDetail }) {
  const given = place.value.params;
  const [partition, setPartition] = useState(given.get("partition") ?? "");
  const [from, setFrom] = useState<From>(given.has("offset") ? "offset" : "newest");
  const [at, setAt] = useState(given.get("offset") ?? "");
  const [key, setKey] = useState("");
  const [text, setText] = useState("");
  const [tailing, setTailing] = useState(false);
  const [found, setFound] = useState<Found | null>(null);
  const [error, setError] = useState<unknown>(null);
  const [busy, setBusy] = useState(false);
  const running = useRef<AbortController | null>(null);

  const match = (record: RecordOut): boolean => (key === "" || record.key === key) && filter(text)(record);

  function begin(): AbortSignal {
    running.current?.abort();
    running.current = new AbortController();
    setError(null);
    return running.current.signal;
  }

  async function search(): Promise<void> {
    const abort = begin();
    setTailing(false);
    setBusy(true);
    try {
      // The page's own look may be two seconds old: what was published since would not be found.
      const fresh = await api.get<TopicDetail>(path`/v1/topics/${topic.name}`, abort);
      setFound(await browse(asked(fresh), abort));
    } catch (problem) {
      if (!abort.aborted) setError(problem);
    } finally {
      if (!abort.aborted) setBusy(false);
    }
  }

  function asked(fresh: TopicDetail): Search {
    const partitions = fresh.partitions.filter((each) => partition === "" || each.number === Number(partition));
    const all = key === "" && text.trim() === "";
    const place = { topic: topic.name, partitions, match, all, wanted: WANTED };
    if (from === "offset") return { ...place, from: { kind: "offset", offset: Number(at) || 0 } };
    if (from === "time") return { ...place, from: { kind: "time", at_ms: new Date(at).getTime() || 0 } };
    return { ...place, from: { kind: from } };
  }

  async function follow(): Promise<void> {
    const abort = begin();
    setTailing(true);
    setBusy(false);
    setFound({ records: [], looked: 0, end: "end" });
    const params = query({ partition: partition === "" ? null : Number(partition), format: "text" });
    try {
      for await (const { event, data } of events(path`/v1/topics/${topic.name}/tail` + params, abort)) {
        if (event === "error") {
          const told = JSON.parse(data) as { status: number; code: string; title: string; detail: string };
          throw new ApiError(told.status, told.code, told.title, told.detail, false);
        }
        const record = JSON.parse(data) as RecordOut;
        setFound((before) => {
          const looked = (before?.looked ?? 0) + 1;
          const records = before?.records ?? [];
          return { records: match(record) ? [record, ...records].slice(0, KEPT) : records, looked, end: "end" };
        });
      }
      if (!abort.aborted) setTailing(false);
    } catch (problem) {
      if (abort.aborted) return;
      setError(problem);
      setTailing(false);
    }
  }

  function stop(): void {
    running.current?.abort();
    setTailing(false);
  }

  useEffect(() => {
    void search();
    return () => running.current?.abort();
    // The first look, when the page is opened; later ones are asked for.
    // eslint-disable-next-line react-hooks/exhaustive-deps
  }, []);

  return (
    <>
      <Card>
        <form
          class="fields compact"
          onSubmit={(event) => {
            event.preventDefault();
            void search();
          }}
        >
          <Field label="Partition">
            <select value={partition} onChange={(event) => setPartition(event.currentTarget.value)}>
              <option value="">all</option>
              {topic.partitions.map((each) => (
                <option key={each.number} value={String(each.number)}>
                  {each.number}
                </option>
              ))}
            </select>
          </Field>
          <Field label="From">
            <select value={from} onChange={(event) => (setFrom(event.currentTarget.value as From), setAt(""))}>
              <option value="newest">the newest, backwards</option>
              <option value="oldest">the oldest</option>
              <option value="offset">an offset</option>
              <option value="time">a time</option>
            </select>
          </Field>
          {from === "offset" && (
            <Field label="Offset">
              <input type="number" min={0} required value={at} onInput={(event) => setAt(event.currentTarget.value)} />
            </Field>
          )}
          {from === "time" && (
            <Field label="Time (local)">
              <input
                type="datetime-local"
                step="1"
                required
                value={at}
                onInput={(event) => setAt(event.currentTarget.value)}
              />
            </Field>
          )}
          <Field label="Key">
            <input value={key} placeholder="any" onInput={(event) => setKey(event.currentTarget.value)} />
          </Field>
          <Field label="Filter" wide>
            <input
              type="search"
              value={text}
              placeholder="text, or a field of JSON: total > 10"
              onInput={(event) => setText(event.currentTarget.value)}
            />
          </Field>
          <div class="field-buttons">
            <button type="submit" class={tailing ? undefined : "primary"} disabled={busy}>
              Look
            </button>
            <button type="button" aria-pressed={tailing} onClick={() => (tailing ? stop() : void follow())}>
              {tailing ? "Stop following" : "Follow live"}
            </button>
          </div>
        </form>
      </Card>
      {error !== null && <Failure error={error} />}
      <RecordList found={found} busy={busy} tailing={tailing} />
    </>
  );
}

function RecordList({ found, busy, tailing }: { found: Found | null; busy: boolean; tailing: boolean }) {
  const [open, setOpen] = useState<string | null>(null);
  if (!found) return busy ? <Loading rows={8} /> : null;
  const id = (each: RecordOut): string => `${each.partition}-${each.offset}`;
  return (
    <Card
      title={tailing ? "As they come, the newest first" : plural(found.records.length, "record")}
      aside={
        <span class="soft" role="status">
          {busy ? "looking…" : tailing ? <span class="live">live · {count(found.looked)} seen</span> : ended(found)}
        </span>
      }
      flush
    >
      {found.records.length === 0 ? (
        <Empty title={tailing ? "Waiting for the first record" : "No records here"}>
          {tailing
            ? "Whatever is published from now on is shown."
            : found.looked > 0
              ? "None that was looked at matches."
              : "Publish one, or look elsewhere."}
        </Empty>
      ) : (
        <div class="table">
          <table class="records" aria-label="Records">
            <thead>
              <tr>
                <th scope="col" class="number">
                  Partition
                </th>
                <th scope="col" class="number">
                  Offset
                </th>
                <th scope="col">Time</th>
                <th scope="col">Key</th>
                <th scope="col" class="grow">
                  Value
                </th>
              </tr>
            </thead>
            <tbody>
              {found.records.map((each) => (
                <Row
                  key={id(each)}
                  record={each}
                  open={open === id(each)}
                  toggle={() => setOpen(open === id(each) ? null : id(each))}
                />
              ))}
            </tbody>
          </table>
        </div>
      )}
    </Card>
  );
}

function ended(found: Found): string {
  if (found.end === "limit")
    return `${count(found.looked)} looked at, which is the most at a time: start elsewhere, or narrow it down`;
  return found.end === "enough" ? "there are more" : `${count(found.looked)} looked at, to the end`;
}

function Row({ record, open, toggle }: { record: RecordOut; open: boolean; toggle: () => void }) {
  return (
    <>
      <tr class="opens" aria-selected={open} onClick={toggle}>
        <td class="number">{record.partition}</td>
        <td class="number">
          <button
            type="button"
            class="link"
            aria-expanded={open}
            onClick={(event) => {
              event.stopPropagation();
              toggle();
            }}
          >
            {count(record.offset)}
          </button>
        </td>
        <td class="nowrap">{time(record.timestamp_ms)}</td>
        <td class="cut">
          {record.key ?? (record.key_base64 ? <code>{record.key_base64}</code> : <span class="soft">none</span>)}
        </td>
        <td class="grow">
          <code>{preview(record) || <span class="soft">no value</span>}</code>
        </td>
      </tr>
      {open && (
        <tr class="opened">
          <td colSpan={5}>
            <Value record={record} headers={record.headers} lane={record.lane} />
          </td>
        </tr>
      )}
    </>
  );
}

type Shown = Pick<RecordOut, "value" | "text" | "base64">;

/** A value in the form that is asked for. Its schema, if Avro, is remembered while the page is open. */
let lastSchema = "";

export function Value({
  record,
  headers,
  lane,
}: {
  record: Shown;
  headers?: Record<string, string> | undefined;
  lane?: number;
}) {
  const [form, setForm] = useState<Form>("auto");
  const [schema, setSchema] = useState(lastSchema);
  const shown = show(record, form, schema);
  const size = bytesOf(record)?.length;
  return (
    <div class="value-box">
      <div class="value-head">
        <div class="forms" role="group" aria-label="Form of the value">
          {(["auto", "json", "text", "avro", "hex"] as Form[]).map((each) => (
            <button key={each} type="button" aria-pressed={form === each} onClick={() => setForm(each)}>
              {each === "auto" ? `auto: ${shown.form}` : each}
            </button>
          ))}
        </div>
        <span class="soft">
          {size === undefined ? "no value" : bytes(size)}
          {lane !== undefined && ` · lane ${lane}`}
        </span>
      </div>
      {form === "avro" && (
        <Field label="Avro schema" wide>
          <textarea
            rows={3}
            spellcheck={false}
            placeholder='{"type": "record", "name": "Order", "fields": […]}'
            value={schema}
            onInput={(event) => setSchema((lastSchema = event.currentTarget.value))}
          />
        </Field>
      )}
      {shown.problem && <p class="soft">{shown.problem}</p>}
      {shown.form !== "none" && <pre>{shown.text}</pre>}
      {headers && Object.keys(headers).length > 0 && (
        <dl class="headers">
          {Object.entries(headers).map(([name, value]) => (
            <div key={name}>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </div>
          ))}
        </dl>
      )}
    </div>
  );
}
