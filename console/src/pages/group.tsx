/** One group: who reads what, how far behind in records and in time, and its positions moved with a look before. */

import { useEffect, useRef, useState } from "preact/hooks";

import { api, ApiError, path, query } from "../api";
import { count, duration, plural, short, time } from "../format";
import { Series } from "../history";
import { history, LOOK_MS, refresh } from "../live";
import { Card, Empty, Failure, Loading, Page, Tile, useAction, useAsked } from "../parts/basics";
import { Chart } from "../parts/chart";
import { Table } from "../parts/table";
import { go, to } from "../router";
import type { GroupDetail, PartitionLag, RecordOut } from "../types";
import { GroupState, Trend } from "./groups";
import { ResetDialog } from "./reset";

const PEEKS_AT_ONCE = 16;

/** Lag in time, of the partitions that have one: the age of their first record that is not read. */
async function ages(group: GroupDetail, abort: AbortSignal): Promise<Map<string, number>> {
  const now_ms = Date.now();
  const found = new Map<string, number>();
  const unknown: PartitionLag[] = [];
  for (const each of group.partitions) {
    if (each.lag === 0) found.set(name(each), 0);
    else if (each.oldest_unread_ms != null) found.set(name(each), Math.max(0, now_ms - each.oldest_unread_ms));
    else if (each.oldest_unread_ms === undefined) unknown.push(each);
  }
  await Promise.all(
    unknown.slice(0, PEEKS_AT_ONCE).map(async (each) => {
      const offsets = Object.values(each.committed);
      const params = query({ partition: each.partition, offset: offsets.length ? Math.min(...offsets) : 0, max: 1 });
      try {
        const { records } = await api.get<{ records: RecordOut[] }>(
          path`/v1/topics/${each.topic}/records` + params,
          abort,
        );
        if (records[0]) found.set(name(each), Math.max(0, now_ms - records[0].timestamp_ms));
      } catch (error) {
        if (!(error instanceof ApiError)) throw error; // not known, then: no grant to read, or no leader now
      }
    }),
  );
  return found;
}

const name = (each: { topic: string; partition: number }): string => `${each.topic}/${each.partition}`;

export function GroupPage({ name: group }: { name: string }) {
  const [resetting, setResetting] = useState(false);
  const [forgetting, setForgetting] = useState(false);
  const late = useRef(new Series());
  const asked = useAsked(
    async (abort) => {
      const detail = await api.get<GroupDetail>(path`/v1/groups/${group}`, abort);
      return { detail, ages: await ages(detail, abort), at_ms: Date.now() };
    },
    group,
    LOOK_MS,
  );
  const forget = useAction(async () => {
    await api.delete(path`/v1/groups/${group}`);
    refresh();
    go("#/groups");
  });
  const { data } = asked;
  const oldest = data && data.ages.size > 0 ? Math.max(...data.ages.values()) : null;
  useEffect(() => {
    if (data && oldest !== null) late.current.add(data.at_ms, oldest);
  }, [data, oldest]);
  if (!data) {
    return (
      <Page title={group} crumb={["Groups", "#/groups"]}>
        {asked.error ? <Failure error={asked.error} /> : <Loading rows={8} />}
      </Page>
    );
  }
  const { detail } = data;
  const lag = history.of(`lag/${group}`);
  return (
    <Page
      title={group}
      crumb={["Groups", "#/groups"]}
      actions={
        <>
          <button type="button" onClick={() => setResetting(true)} disabled={detail.partitions.length === 0}>
            Reset positions…
          </button>
          {detail.members.length === 0 && (
            <button type="button" class="danger" onClick={() => (forgetting ? void forget.run() : setForgetting(true))}>
              {forgetting ? "Really forget it" : "Forget group…"}
            </button>
          )}
        </>
      }
    >
      {forget.error !== null && <Failure error={forget.error} />}
      <div class="tiles">
        <Tile
          label="To read"
          value={count(detail.lag)}
          note={detail.lag === 0 ? "all is read" : "records"}
          tone={detail.lag === 0 ? "good" : "note"}
        />
        <Tile
          label="Behind in time"
          value={detail.lag === 0 ? "0 s" : duration(oldest)}
          note="of the oldest unread record"
        />
        <div class="tile">
          <div class="label">Trend</div>
          <div class="value">
            <Trend series={lag} told={detail.lag_trend_per_s} />
          </div>
          <div class="note">records to read, last 30 s</div>
        </div>
        <div class="tile">
          <div class="label">Members</div>
          <div class="value">
            {count(detail.members.length)} <GroupState members={detail.members.length} state={detail.state} />
          </div>
          <div class="note">
            generation {detail.generation}, {detail.assignor}
          </div>
        </div>
      </div>
      <div class="columns">
        <Card title="Records to read">
          <Chart series={lag} at_ms={data.at_ms} label="Records to read" format={short} />
        </Card>
        <Card title="Behind in time">
          <Chart series={late.current} at_ms={data.at_ms} label="Age of the oldest unread record" format={duration} />
        </Card>
      </div>
      <Partitions detail={detail} ages={data.ages} />
      <Members detail={detail} />
      {resetting && <ResetDialog group={detail} onClose={() => (setResetting(false), asked.again(), refresh())} />}
    </Page>
  );
}

function Partitions({ detail, ages }: { detail: GroupDetail; ages: Map<string, number> }) {
  const clients = new Map(detail.members.map((each) => [each.member, each.client]));
  return (
    <Card title="Who reads what" flush>
      {detail.partitions.length === 0 ? (
        <Empty title="It reads nothing yet">It has no partitions and no positions.</Empty>
      ) : (
        <Table
          label="Partitions of the group"
          rows={detail.partitions}
          rowKey={name}
          sorted={["Partition", "up"]}
          columns={[
            {
              name: "Partition",
              cell: (each) => <a href={to("topics", each.topic)}>{name(each)}</a>,
              by: name,
            },
            {
              name: "Read by",
              cell: (each) =>
                each.member === null ? (
                  <span class="soft">nobody</span>
                ) : (
                  <span title={each.member}>{clients.get(each.member) || each.member}</span>
                ),
              by: (each) => each.member ?? "",
              grow: true,
            },
            { name: "Position", cell: (each) => <Positions committed={each.committed} />, number: true },
            { name: "To read", cell: (each) => count(each.lag), by: (each) => each.lag, number: true },
            {
              name: "Behind",
              cell: (each) => duration(ages.get(name(each))),
              by: (each) => ages.get(name(each)) ?? -1,
              number: true,
            },
          ]}
        />
      )}
    </Card>
  );
}

/** Of one lane the offset; of several, each with its lane. */
export function Positions({ committed }: { committed: Record<string, number> }) {
  const lanes = Object.entries(committed);
  if (lanes.length === 0) return <span class="soft">none</span>;
  if (lanes.length === 1) return <>{count(lanes[0]?.[1])}</>;
  return <>{lanes.map(([lane, offset]) => `${lane}: ${count(offset)}`).join(" · ")}</>;
}

function Members({ detail }: { detail: GroupDetail }) {
  const held = (member: string): number => detail.partitions.filter((each) => each.member === member).length;
  return (
    <Card title="Members" flush>
      {detail.members.length === 0 ? (
        <Empty title="Nobody is in this group now">
          {detail.empty_since_ms !== null && `Since ${time(detail.empty_since_ms)}. `}
          {detail.expires_at_ms !== null && `It is forgotten at ${time(detail.expires_at_ms)} unless somebody joins.`}
        </Empty>
      ) : (
        <Table
          label="Members"
          rows={detail.members}
          rowKey={(each) => each.member}
          sorted={["Client", "up"]}
          columns={[
            { name: "Client", cell: (each) => each.client || "–", by: (each) => each.client },
            { name: "Member", cell: (each) => <code>{each.member}</code>, by: (each) => each.member, grow: true },
            { name: "Instance", cell: (each) => each.instance ?? "–" },
            { name: "Topics", cell: (each) => each.topics.join(", ") },
            {
              name: "Reads",
              cell: (each) => plural(held(each.member), "partition"),
              by: (each) => held(each.member),
              number: true,
            },
          ]}
        />
      )}
    </Card>
  );
}
