/** One topic: partitions with leader, followers, terms and how far behind each copy is; its records; publishing; settings. */

import { useState } from "preact/hooks";

import { api, path } from "../api";
import { bytes, count, rate } from "../format";
import { history, LOOK_MS, overview, refresh } from "../live";
import { Badge, Card, Dialog, Failure, Field, Loading, Page, Tile, useAction, useAsked } from "../parts/basics";
import { Chart } from "../parts/chart";
import { Table } from "../parts/table";
import { behind, broken } from "../problems";
import { go, to } from "../router";
import type { Partition, Replica, TopicDetail } from "../types";
import { Publish } from "./publish";
import { Records } from "./records";
import { Health } from "./topics";

const TABS: [string, string][] = [
  ["partitions", "Partitions"],
  ["records", "Records"],
  ["publish", "Publish"],
  ["settings", "Settings"],
];

export function TopicPage({ name, tab }: { name: string; tab: string }) {
  const [deleting, setDeleting] = useState(false);
  const { data: topic, error } = useAsked(
    (abort) => api.get<TopicDetail>(path`/v1/topics/${name}`, abort),
    name,
    LOOK_MS,
  );
  if (!topic) {
    return (
      <Page title={name} crumb={["Topics", "#/topics"]}>
        {error ? <Failure error={error} /> : <Loading rows={8} />}
      </Page>
    );
  }
  return (
    <Page
      title={name}
      crumb={["Topics", "#/topics"]}
      actions={
        <>
          <Health partitions={topic.partitions} />
          <button type="button" class="danger" onClick={() => setDeleting(true)}>
            Delete…
          </button>
        </>
      }
    >
      <nav class="tabs" aria-label="Parts of the topic">
        {TABS.map(([part, title]) => (
          <a key={part} href={to("topics", name, part)} aria-current={part === tab ? "page" : undefined}>
            {title}
          </a>
        ))}
      </nav>
      {tab === "records" ? (
        <Records topic={topic} />
      ) : tab === "publish" ? (
        <Publish topic={topic} />
      ) : tab === "settings" ? (
        <TopicSettings topic={topic} />
      ) : (
        <Partitions topic={topic} />
      )}
      {deleting && <DeleteTopic topic={topic} onClose={() => setDeleting(false)} />}
    </Page>
  );
}

function Partitions({ topic }: { topic: TopicDetail }) {
  const coming = history.of(`in/${topic.name}`);
  const readers = overview.value?.groups.filter((each) => each.topics.includes(topic.name)) ?? [];
  return (
    <>
      <div class="tiles">
        <Tile label="Records in" value={`${rate(coming.last)} /s`} note="now" />
        <Tile label="Records" value={count(topic.records)} note="in the log" />
        <Tile label="Size" value={bytes(topic.size_bytes)} note="of one copy" />
        <div class="tile">
          <div class="label">Read by</div>
          <div class="value">{count(readers.length)}</div>
          <div class="note">
            {readers.length === 0
              ? "no group"
              : readers.slice(0, 3).map((each, i) => (
                  <span key={each.group}>
                    {i > 0 && ", "}
                    <a href={to("groups", each.group)}>{each.group}</a>
                  </span>
                ))}
            {readers.length > 3 && ` and ${readers.length - 3} more`}
          </div>
        </div>
      </div>
      <Card title="Records published per second">
        <Chart
          series={coming}
          at_ms={overview.value?.now_ms ?? 0}
          label="Records published per second"
          format={rate}
          height={150}
        />
      </Card>
      <Card title="Partitions" flush>
        <Table
          label="Partitions"
          rows={topic.partitions}
          rowKey={(each) => String(each.number)}
          sorted={["Partition", "up"]}
          columns={[
            {
              name: "Partition",
              cell: (each) => (
                <a href={`${to("topics", topic.name, "records")}?partition=${each.number}`}>{each.number}</a>
              ),
              by: (each) => each.number,
            },
            {
              name: "Leader",
              cell: (each) => (each.leader === null ? <Badge tone="critical">none</Badge> : <code>{each.leader}</code>),
              by: (each) => each.leader ?? "",
            },
            { name: "Term", cell: (each) => count(each.term), by: (each) => each.term, number: true },
            { name: "Copies, and how far behind", cell: (each) => <Replicas partition={each} />, grow: true },
            { name: "First", cell: (each) => count(each.start_offset), by: (each) => each.start_offset, number: true },
            { name: "Next", cell: (each) => count(each.end_offset), by: (each) => each.end_offset, number: true },
            { name: "Size", cell: (each) => bytes(each.size_bytes), by: (each) => each.size_bytes, number: true },
          ]}
        />
      </Card>
    </>
  );
}

function Replicas({ partition }: { partition: Partition }) {
  return (
    <ul class="replicas">
      {partition.replicas.map((each) => (
        <li
          key={each.replica_id}
          data-tone={tone(partition, each)}
          title={each.problem ?? `${each.replica_id}: ${each.role}`}
        >
          <span class="mark" aria-hidden="true">
            {each.role === "leader" ? "●" : "○"}
          </span>
          {each.broker} <span class="soft">{said(partition, each)}</span>
        </li>
      ))}
    </ul>
  );
}

function said(partition: Partition, replica: Replica): string {
  if (broken(replica)) return replica.problem ?? "does not answer";
  if (replica.role === "leader") return "leads";
  const missing = behind(partition, replica);
  const role = replica.role === "follower" ? "" : `${replica.role}, `;
  return role + (missing === null ? "?" : missing === 0 ? "in step" : `−${count(missing)}`);
}

function tone(partition: Partition, replica: Replica): string {
  if (broken(replica)) return "warning";
  return replica.role === "leader" ? "accent" : (behind(partition, replica) ?? 0) > 0 ? "note" : "good";
}

function TopicSettings({ topic }: { topic: TopicDetail }) {
  return (
    <Card
      title="Settings"
      aside={<span class="soft">changed by rayqueue topics alter, or PATCH /v1/topics/{topic.name}</span>}
      flush
    >
      <Table
        label="Settings"
        rows={Object.entries(topic.settings)}
        rowKey={([name]) => name}
        sorted={["Setting", "up"]}
        columns={[
          { name: "Setting", cell: ([name]) => <code>{name}</code>, by: ([name]) => name, grow: true },
          {
            name: "Value",
            cell: ([, value]) =>
              value === null ? (
                <span class="soft">no limit</span>
              ) : typeof value === "number" ? (
                count(value)
              ) : (
                String(value)
              ),
            number: true,
          },
        ]}
      />
    </Card>
  );
}

function DeleteTopic({ topic, onClose }: { topic: TopicDetail; onClose: () => void }) {
  const [typed, setTyped] = useState("");
  const remove = useAction(async () => {
    await api.delete(path`/v1/topics/${topic.name}`);
    refresh();
    go("#/topics");
  });
  return (
    <Dialog title={`Delete ${topic.name}`} onClose={onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void remove.run();
        }}
      >
        <p>
          Its {count(topic.records)} records, and the positions of every group in it, are gone for good. There is no way
          back.
        </p>
        <Field label={`Type ${topic.name} to delete it`} wide>
          <input autofocus autocomplete="off" value={typed} onInput={(event) => setTyped(event.currentTarget.value)} />
        </Field>
        {remove.error !== null && <Failure error={remove.error} />}
        <footer>
          <button type="button" onClick={onClose}>
            Keep it
          </button>
          <button type="submit" class="danger" disabled={typed !== topic.name || remove.busy}>
            Delete
          </button>
        </footer>
      </form>
    </Dialog>
  );
}
