/** The cluster at a glance: what it does, what is wrong and why. */

import { count, plural, rate, short } from "../format";
import { history, overview, problems } from "../live";
import { Badge, Card, Empty, Page, Tile } from "../parts/basics";
import { Chart, Spark } from "../parts/chart";
import { Table } from "../parts/table";
import type { Problem } from "../problems";
import { to } from "../router";
import type { Broker, Overview } from "../types";
import { Trend } from "./groups";

export function OverviewPage() {
  const look = overview.value;
  if (!look) return null;
  const alive = look.cluster.brokers.filter((each) => each.alive).length;
  const all = look.topics.flatMap((topic) => topic.partitions);
  const led = all.filter((each) => each.leader !== null).length;
  const coming = history.of("in");
  const lag = look.groups.reduce((sum, group) => sum + (group.lag ?? 0), 0);
  return (
    <Page title="Overview">
      <div class="tiles">
        <Tile
          label="Brokers"
          value={`${alive} / ${look.cluster.brokers.length}`}
          note={alive === look.cluster.brokers.length ? "all are there" : `${look.cluster.brokers.length - alive} away`}
          tone={alive === look.cluster.brokers.length ? "good" : "warning"}
        />
        <Tile
          label="Partitions with a leader"
          value={`${count(led)} / ${count(all.length)}`}
          note={plural(look.topics.length, "topic")}
          tone={led === all.length ? "good" : "critical"}
        />
        <Tile label="Records in" value={`${rate(coming.last)} /s`} note="all topics" />
        <Tile label="Waiting for groups" value={short(lag)} note={plural(look.groups.length, "group")} />
      </div>
      <Attention problems={problems.value} />
      <div class="columns">
        <Card title="Records published per second">
          <Chart series={coming} at_ms={look.now_ms} label="Records published per second" format={rate} />
        </Card>
        <Card title="Records that groups have still to read">
          <Chart series={history.of("lag")} at_ms={look.now_ms} label="Records to read" />
        </Card>
      </div>
      <Brokers look={look} />
      <div class="columns">
        <Busiest look={look} />
        <Lagging look={look} />
      </div>
    </Page>
  );
}

function Attention({ problems }: { problems: Problem[] }) {
  const worst = problems[0]?.severity;
  const title = !worst
    ? "Nothing is wrong"
    : worst === "note"
      ? "Nothing is wrong; worth knowing"
      : "What is wrong, and why";
  return (
    <Card title={title} flush={problems.length > 0}>
      {problems.length === 0 ? (
        <p class="soft calm">Every broker is there, every partition has a leader, every replica answers.</p>
      ) : (
        <ul class="problems" data-tone={worst}>
          {problems.slice(0, 12).map((each) => (
            <li key={each.what}>
              <Badge tone={each.severity}>{each.severity}</Badge>
              <div>
                <a href={each.link}>{each.what}</a>
                <p class="soft">{each.why}</p>
              </div>
            </li>
          ))}
          {problems.length > 12 && <li class="soft">and {problems.length - 12} more</li>}
        </ul>
      )}
    </Card>
  );
}

function Brokers({ look }: { look: Overview }) {
  const leads = new Map<string, number>();
  for (const { leader } of look.topics.flatMap((topic) => topic.partitions))
    if (leader !== null) leads.set(leader, (leads.get(leader) ?? 0) + 1);
  const led = (broker: Broker): number => leads.get(broker.broker) ?? 0;
  return (
    <Card
      title="Brokers"
      aside={
        <span class="soft">
          coordinator: {look.cluster.coordinator}, term {look.cluster.term}
        </span>
      }
      flush
    >
      <Table
        label="Brokers"
        rows={look.cluster.brokers}
        rowKey={(each) => each.broker}
        sorted={["Broker", "up"]}
        columns={[
          { name: "Broker", cell: (each) => <code>{each.broker}</code>, by: (each) => each.broker },
          { name: "State", cell: state, by: (each) => `${each.alive} ${each.draining}` },
          { name: "Host", cell: (each) => each.host, by: (each) => each.host, grow: true },
          { name: "Leads", cell: (each) => count(led(each)), by: led, number: true },
          { name: "Replicas", cell: (each) => count(each.replicas), by: (each) => each.replicas, number: true },
          { name: "Room", cell: (each) => (each.room === null ? "no bound" : count(each.room)), number: true },
        ]}
      />
    </Card>
  );
}

function state(broker: Broker) {
  if (!broker.alive) return <Badge tone="warning">away</Badge>;
  return broker.draining ? <Badge tone="note">being emptied</Badge> : <Badge tone="good">there</Badge>;
}

function Busiest({ look }: { look: Overview }) {
  const rows = look.topics
    .map(({ name }) => ({ name, series: history.of(`in/${name}`) }))
    .sort((a, b) => (b.series.last ?? 0) - (a.series.last ?? 0) || a.name.localeCompare(b.name))
    .slice(0, 6);
  return (
    <Card title="Busiest topics" aside={<a href="#/topics">all topics</a>} flush>
      {rows.length === 0 ? (
        <Empty title="There are no topics yet">
          <a href="#/topics">Create one</a>, or publish by REST, gRPC or Python.
        </Empty>
      ) : (
        <Table
          label="Busiest topics"
          rows={rows}
          rowKey={(each) => each.name}
          columns={[
            { name: "Topic", cell: (each) => <a href={to("topics", each.name)}>{each.name}</a>, grow: true },
            { name: "Last minutes", cell: (each) => <Spark series={each.series} /> },
            { name: "Records /s", cell: (each) => rate(each.series.last), number: true },
          ]}
        />
      )}
    </Card>
  );
}

function Lagging({ look }: { look: Overview }) {
  const rows = [...look.groups].sort((a, b) => (b.lag ?? 0) - (a.lag ?? 0)).slice(0, 6);
  return (
    <Card title="Groups furthest behind" aside={<a href="#/groups">all groups</a>} flush>
      {rows.length === 0 ? (
        <Empty title="There are no groups yet">A group is made when its first consumer joins.</Empty>
      ) : (
        <Table
          label="Groups furthest behind"
          rows={rows}
          rowKey={(each) => each.group}
          columns={[
            { name: "Group", cell: (each) => <a href={to("groups", each.group)}>{each.group}</a>, grow: true },
            { name: "Last minutes", cell: (each) => <Spark series={history.of(`lag/${each.group}`)} /> },
            { name: "To read", cell: (each) => count(each.lag), number: true },
            {
              name: "Trend",
              cell: (each) => <Trend series={history.of(`lag/${each.group}`)} told={each.lag_trend_per_s} />,
              number: true,
            },
          ]}
        />
      )}
    </Card>
  );
}
