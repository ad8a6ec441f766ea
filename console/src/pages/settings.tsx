/** Settings in force, and where each came from. */

import { useState } from "preact/hooks";

import { api, ApiError } from "../api";
import { Badge, Card, Empty, Failure, Loading, Page, useAsked } from "../parts/basics";
import { Table } from "../parts/table";
import type { Setting } from "../types";

export function SettingsPage() {
  const [sought, setSought] = useState("");
  const [changed, setChanged] = useState(false);
  const { data, error } = useAsked((abort) => api.get<{ settings: Setting[] }>("/v1/settings", abort), "settings");
  const rows =
    data?.settings.filter((each) => each.key.includes(sought) && (!changed || each.source !== "default")) ?? [];
  return (
    <Page
      title="Settings"
      actions={
        <>
          <label class="check">
            <input type="checkbox" checked={changed} onChange={(event) => setChanged(event.currentTarget.checked)} />{" "}
            only what was set
          </label>
          <input
            type="search"
            placeholder="Filter settings"
            aria-label="Filter settings"
            value={sought}
            onInput={(event) => setSought(event.currentTarget.value)}
          />
        </>
      }
    >
      {data ? (
        <Card title="Of this gateway's process" aside={<span class="soft">secrets are not shown</span>} flush>
          {rows.length === 0 ? (
            <Empty title={changed && !sought ? "Everything has its default" : "No setting has this in its name"} />
          ) : (
            <Table
              label="Settings"
              rows={rows}
              rowKey={(each) => each.key}
              sorted={["Setting", "up"]}
              columns={[
                { name: "Setting", cell: (each) => <code>{each.key}</code>, by: (each) => each.key },
                { name: "Value", cell: (each) => <code class="folded">{each.value}</code>, number: true },
                {
                  name: "Source",
                  cell: (each) =>
                    each.source === "default" ? (
                      <span class="soft">default</span>
                    ) : (
                      <Badge tone="note">{each.source}</Badge>
                    ),
                  by: (each) => each.source,
                },
                {
                  name: "Meaning",
                  cell: (each) => <span class="soft folded">{each.description ?? ""}</span>,
                  grow: true,
                },
              ]}
            />
          )}
        </Card>
      ) : error instanceof ApiError && error.missing ? (
        <Card>
          <Empty title="This gateway does not tell its settings">
            <code>rayqueue config</code> shows them, with their sources.
          </Empty>
        </Card>
      ) : error ? (
        <Failure error={error} />
      ) : (
        <Loading rows={10} />
      )}
    </Page>
  );
}
