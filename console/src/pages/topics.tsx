/** All topics: what comes in, what is there, whether every partition is served; and new ones. */

import { useState } from "preact/hooks";

import { api } from "../api";
import { bytes, count, plural, rate } from "../format";
import { history, overview, refresh } from "../live";
import { Badge, Card, Dialog, Empty, Failure, Field, Page, useAction } from "../parts/basics";
import { Spark } from "../parts/chart";
import { Table } from "../parts/table";
import { broken } from "../problems";
import { go, to } from "../router";
import type { Overview, Partition, TopicSummary } from "../types";

type Topic = Overview["topics"][number];

const records = (topic: Topic): number =>
  topic.partitions.reduce((sum, each) => sum + each.end_offset - each.start_offset, 0);
const size = (topic: Topic): number => topic.partitions.reduce((sum, each) => sum + each.size_bytes, 0);

/** The most that a group has still to read of it. */
function backlog(look: Overview, topic: Topic): number {
  return Math.max(
    0,
    ...look.groups
      .filter((each) => each.topics.length === 1 && each.topics[0] === topic.name)
      .map((each) => each.lag ?? 0),
  );
}

export function Health({ partitions }: { partitions: Partition[] }) {
  const orphans = partitions.filter((each) => each.leader === null).length;
  if (orphans > 0) return <Badge tone="critical">{plural(orphans, "partition")} without leader</Badge>;
  const bad = partitions.flatMap((each) => each.replicas).filter(broken).length;
  if (bad > 0) return <Badge tone="warning">{plural(bad, "replica")} out of service</Badge>;
  return <Badge tone="good">healthy</Badge>;
}

export function TopicsPage() {
  const [sought, setSought] = useState("");
  const [creating, setCreating] = useState(false);
  const look = overview.value;
  if (!look) return null;
  const rows = look.topics.filter((each) => each.name.includes(sought));
  const incoming = (each: Topic): number => history.of(`in/${each.name}`).last ?? 0;
  return (
    <Page
      title="Topics"
      actions={
        <>
          <input
            type="search"
            placeholder="Filter topics"
            aria-label="Filter topics"
            value={sought}
            onInput={(event) => setSought(event.currentTarget.value)}
          />
          <button type="button" class="primary" onClick={() => setCreating(true)}>
            Create topic
          </button>
        </>
      }
    >
      <Card flush>
        {rows.length === 0 ? (
          <Empty title={sought ? "No topic has this in its name" : "There are no topics yet"}>
            {!sought && "A topic is a named log of records, cut into partitions. Create the first one."}
          </Empty>
        ) : (
          <Table
            label="Topics"
            rows={rows}
            rowKey={(each) => each.name}
            sorted={["Topic", "up"]}
            columns={[
              {
                name: "Topic",
                cell: (each) => (
                  <>
                    <a href={to("topics", each.name)}>{each.name}</a>
                    {each.kind === "queue" && (
                      <>
                        {" "}
                        <a href={to("queues", each.name)}>
                          <Badge tone="note">queue</Badge>
                        </a>
                      </>
                    )}
                  </>
                ),
                by: (each) => each.name,
                grow: true,
              },
              { name: "State", cell: (each) => <Health partitions={each.partitions} /> },
              {
                name: "Partitions",
                cell: (each) => count(each.partitions.length),
                by: (each) => each.partitions.length,
                number: true,
              },
              { name: "Records", cell: (each) => count(records(each)), by: records, number: true },
              { name: "Size", cell: (each) => bytes(size(each)), by: size, number: true },
              {
                name: "Backlog",
                cell: (each) => count(backlog(look, each)),
                by: (each) => backlog(look, each),
                number: true,
              },
              { name: "Last minutes", cell: (each) => <Spark series={history.of(`in/${each.name}`)} /> },
              { name: "In /s", cell: (each) => rate(history.of(`in/${each.name}`).last), by: incoming, number: true },
            ]}
          />
        )}
      </Card>
      {creating && <CreateTopic onClose={() => setCreating(false)} />}
    </Page>
  );
}

function CreateTopic({ onClose }: { onClose: () => void }) {
  const [name, setName] = useState("");
  const [partitions, setPartitions] = useState("4");
  const [replication, setReplication] = useState("");
  const [lanes, setLanes] = useState("");
  const [days, setDays] = useState("");
  const create = useAction(async () => {
    const body: Record<string, unknown> = { name, partitions: Number(partitions) };
    if (replication) body["replication"] = Number(replication);
    if (lanes) body["lanes"] = Number(lanes);
    if (days) body["retention_ms"] = Math.round(Number(days) * 86_400_000);
    await api.post<TopicSummary>("/v1/topics", body);
    refresh();
    go(to("topics", name));
  });
  return (
    <Dialog title="Create topic" onClose={onClose}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void create.run();
        }}
      >
        <div class="fields">
          <Field label="Name" hint="letters, digits, dots, dashes, underscores" wide>
            <input
              required
              autofocus
              pattern="[A-Za-z0-9][A-Za-z0-9._\-]*"
              maxLength={200}
              value={name}
              onInput={(event) => setName(event.currentTarget.value)}
            />
          </Field>
          <Field label="Partitions" hint="what can be read side by side">
            <input
              type="number"
              min={1}
              max={4096}
              required
              value={partitions}
              onInput={(event) => setPartitions(event.currentTarget.value)}
            />
          </Field>
          <Field label="Copies of each" hint="empty: the default">
            <input
              type="number"
              min={1}
              max={7}
              value={replication}
              onInput={(event) => setReplication(event.currentTarget.value)}
            />
          </Field>
          <Field label="Lanes" hint="priorities; empty: one">
            <input
              type="number"
              min={1}
              max={255}
              value={lanes}
              onInput={(event) => setLanes(event.currentTarget.value)}
            />
          </Field>
          <Field label="Kept for days" hint="empty: the default">
            <input
              type="number"
              min={0.001}
              step="any"
              value={days}
              onInput={(event) => setDays(event.currentTarget.value)}
            />
          </Field>
        </div>
        {create.error !== null && <Failure error={create.error} />}
        <footer>
          <span class="soft">{create.busy ? "Waiting until every partition has a leader…" : ""}</span>
          <button type="submit" class="primary" disabled={create.busy || name === ""}>
            Create
          </button>
        </footer>
      </form>
    </Dialog>
  );
}
