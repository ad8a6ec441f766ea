/** All groups: who has how much to read, and whether that grows. */

import { useState } from "preact/hooks";

import { count, short } from "../format";
import type { Series } from "../history";
import { history, overview } from "../live";
import { Badge, Card, Empty, Page } from "../parts/basics";
import { Spark } from "../parts/chart";
import { Table } from "../parts/table";
import { to } from "../router";

/** Whether a lag grows, by how much per second: as this page has seen it, or until then as the gateway tells it. */
export function Trend({ series, told }: { series: Series; told?: number | null | undefined }) {
  const slope = series.trend() ?? told ?? null;
  if (slope === null) return <span class="soft">–</span>;
  const last = series.last ?? 0;
  if (Math.abs(slope) < Math.max(0.5, last * 0.001)) return <span class="soft">steady</span>;
  return (
    <span class="trend" data-tone={slope > 0 ? "warning" : "good"}>
      {slope > 0 ? "↗" : "↘"} {short(Math.abs(slope))} /s
    </span>
  );
}

export function GroupsPage() {
  const [sought, setSought] = useState("");
  const look = overview.value;
  if (!look) return null;
  const rows = look.groups.filter((each) => each.group.includes(sought));
  return (
    <Page
      title="Groups"
      actions={
        <input
          type="search"
          placeholder="Filter groups"
          aria-label="Filter groups"
          value={sought}
          onInput={(event) => setSought(event.currentTarget.value)}
        />
      }
    >
      <Card flush>
        {rows.length === 0 ? (
          <Empty title={sought ? "No group has this in its name" : "There are no groups yet"}>
            {!sought && "A group is made when its first consumer joins."}
          </Empty>
        ) : (
          <Table
            label="Groups"
            rows={rows}
            rowKey={(each) => each.group}
            sorted={["To read", "down"]}
            columns={[
              {
                name: "Group",
                cell: (each) => <a href={to("groups", each.group)}>{each.group}</a>,
                by: (each) => each.group,
              },
              {
                name: "State",
                cell: (each) => <GroupState members={each.members} state={each.state} />,
                by: (each) => each.state,
              },
              { name: "Topics", cell: (each) => each.topics.join(", ") || "–", grow: true },
              { name: "Members", cell: (each) => count(each.members), by: (each) => each.members, number: true },
              { name: "Last minutes", cell: (each) => <Spark series={history.of(`lag/${each.group}`)} /> },
              {
                name: "Trend",
                cell: (each) => <Trend series={history.of(`lag/${each.group}`)} told={each.lag_trend_per_s} />,
                number: true,
              },
              { name: "To read", cell: (each) => count(each.lag), by: (each) => each.lag ?? -1, number: true },
            ]}
          />
        )}
      </Card>
    </Page>
  );
}

export function GroupState({ members, state }: { members: number; state: string }) {
  return <Badge tone={members === 0 ? undefined : state === "stable" ? "good" : "note"}>{state}</Badge>;
}
