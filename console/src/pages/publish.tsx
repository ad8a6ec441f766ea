/** One record published, by hand. */

import { useState } from "preact/hooks";

import { api, path } from "../api";
import { count, time } from "../format";
import { refresh } from "../live";
import { Card, Failure, Field, useAction } from "../parts/basics";
import { to } from "../router";
import type { Published, TopicDetail } from "../types";
import { isJson } from "../values";

type Kind = "json" | "text" | "base64" | "none";

export function recordBody(kind: Kind, value: string, key: string, headers: string): Record<string, unknown> {
  const record: Record<string, unknown> = {};
  if (kind === "json" && !isJson(value)) throw new Error("This is not JSON. Choose text to send it as it is.");
  // JSON goes as its text: its digits and its spaces arrive as they were typed.
  if (kind === "json" || kind === "text") record["text"] = value;
  if (kind === "base64") record["base64"] = value.trim();
  if (key !== "") record["key"] = key;
  const named = headers
    .split("\n")
    .filter((line) => line.trim() !== "")
    .map((line) => {
      const at = line.indexOf(":");
      if (at < 1) throw new Error(`A header is a name, a colon and a value, not “${line}”.`);
      return [line.slice(0, at).trim(), line.slice(at + 1).trim()];
    });
  if (named.length > 0) record["headers"] = Object.fromEntries(named) as Record<string, string>;
  return record;
}

export function Publish({ topic }: { topic: TopicDetail }) {
  const [kind, setKind] = useState<Kind>("json");
  const [value, setValue] = useState("");
  const [key, setKey] = useState("");
  const [headers, setHeaders] = useState("");
  const [partition, setPartition] = useState("");
  const [priority, setPriority] = useState("0");
  const [written, setWritten] = useState<Published["records"]>([]);
  const lanes = Number(topic.settings["lanes"] ?? 1);
  const send = useAction(async () => {
    const record = recordBody(kind, value, key, headers);
    if (partition !== "") record["partition"] = Number(partition);
    if (priority !== "0") record["priority"] = Number(priority);
    const made = await api.post<Published>(path`/v1/topics/${topic.name}/records`, { records: [record] });
    setWritten((before) => [...made.records, ...before].slice(0, 10));
    refresh();
  });
  return (
    <div class="columns">
      <Card title="Record">
        <form
          onSubmit={(event) => {
            event.preventDefault();
            void send.run();
          }}
        >
          <div class="fields">
            <Field label="Key" hint="records of one key keep their order">
              <input value={key} placeholder="none" onInput={(event) => setKey(event.currentTarget.value)} />
            </Field>
            <Field label="Value is">
              <select value={kind} onChange={(event) => setKind(event.currentTarget.value as Kind)}>
                <option value="json">JSON</option>
                <option value="text">text</option>
                <option value="base64">bytes, as base64</option>
                <option value="none">none</option>
              </select>
            </Field>
            {kind !== "none" && (
              <Field label="Value" wide>
                <textarea
                  rows={8}
                  spellcheck={false}
                  value={value}
                  placeholder={kind === "json" ? '{"order": 17, "total": 12.5}' : ""}
                  onInput={(event) => setValue(event.currentTarget.value)}
                />
              </Field>
            )}
            <Field label="Headers" hint="one per line: name: value" wide>
              <textarea
                rows={2}
                spellcheck={false}
                value={headers}
                onInput={(event) => setHeaders(event.currentTarget.value)}
              />
            </Field>
            <Field label="Partition">
              <select value={partition} onChange={(event) => setPartition(event.currentTarget.value)}>
                <option value="">by key</option>
                {topic.partitions.map((each) => (
                  <option key={each.number} value={String(each.number)}>
                    {each.number}
                  </option>
                ))}
              </select>
            </Field>
            {lanes > 1 && (
              <Field label="Lane" hint="the highest is read first">
                <select value={priority} onChange={(event) => setPriority(event.currentTarget.value)}>
                  {Array.from({ length: lanes }, (_, lane) => (
                    <option key={lane}>{lane}</option>
                  ))}
                </select>
              </Field>
            )}
          </div>
          {send.error !== null && <Failure error={send.error} />}
          <footer>
            <span class="soft">{send.busy ? "Waiting for a majority…" : ""}</span>
            <button type="submit" class="primary" disabled={send.busy}>
              Publish
            </button>
          </footer>
        </form>
      </Card>
      <Card title="Acknowledged">
        {written.length === 0 ? (
          <p class="soft">A record is shown here once it is on the disks of a majority.</p>
        ) : (
          <ol class="written" aria-live="polite">
            {written.map((each) => (
              <li key={`${each.partition}-${each.offset}`}>
                <a href={`${to("topics", topic.name, "records")}?partition=${each.partition}&offset=${each.offset}`}>
                  partition {each.partition}, offset {count(each.offset)}
                </a>
                <span class="soft">{time(each.timestamp_ms)}</span>
              </li>
            ))}
          </ol>
        )}
      </Card>
    </div>
  );
}
