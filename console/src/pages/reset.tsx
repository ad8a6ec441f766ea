/** A group's positions moved: first what that would do, partition by partition; then, if wanted, done. */

import { useState } from "preact/hooks";

import { api, path } from "../api";
import { count, plural } from "../format";
import { Dialog, Failure, Field, useAction } from "../parts/basics";
import { Table } from "../parts/table";
import type { GroupDetail, GroupReset, Moved } from "../types";
import { Positions } from "./group";

type Way = "earliest" | "latest" | "offset" | "time" | "by";

export function resetBody(way: Way, given: string, topic: string): Record<string, unknown> {
  const where: Record<string, unknown> = topic === "" ? {} : { topic };
  if (way === "earliest" || way === "latest") return { ...where, to: way };
  if (way === "time") {
    const at = new Date(given).getTime();
    if (Number.isNaN(at)) throw new Error("Give a day and a time.");
    return { ...where, to_time_ms: at };
  }
  if (!/^-?\d+$/.test(given.trim())) throw new Error("Give a whole number.");
  return way === "by" ? { ...where, by: Number(given) } : { ...where, to: Number(given) };
}

export function ResetDialog({ group, onClose }: { group: GroupDetail; onClose: () => void }) {
  const topics = [...new Set(group.partitions.map((each) => each.topic))].sort();
  const [way, setWay] = useState<Way>("earliest");
  const [given, setGiven] = useState("");
  const [topic, setTopic] = useState(topics.length === 1 ? (topics[0] ?? "") : "");
  const [plan, setPlan] = useState<GroupReset | null>(null);
  const url = path`/v1/groups/${group.group}/reset`;
  const preview = useAction(async () => {
    setPlan(await api.post<GroupReset>(url, { ...resetBody(way, given, topic), dry_run: true }));
  });
  const execute = useAction(async () => {
    setPlan(await api.post<GroupReset>(url, resetBody(way, given, topic)));
  });
  const changed = <T,>(set: (value: T) => void, value: T): void => {
    set(value);
    setPlan(null);
  };
  const error = preview.error ?? execute.error;
  return (
    <Dialog title={`Reset positions of ${group.group}`} onClose={onClose} wide>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void preview.run();
        }}
      >
        <div class="fields">
          <Field label="To">
            <select
              value={way}
              onChange={(event) => changed(setWay, event.currentTarget.value as Way)}
              disabled={plan?.executed}
            >
              <option value="earliest">the oldest record</option>
              <option value="latest">the end: skip what is there</option>
              <option value="time">a time</option>
              <option value="offset">an offset</option>
              <option value="by">by a number of records</option>
            </select>
          </Field>
          {way === "time" && (
            <Field label="Time (local)">
              <input
                type="datetime-local"
                step="1"
                required
                value={given}
                onInput={(event) => changed(setGiven, event.currentTarget.value)}
              />
            </Field>
          )}
          {(way === "offset" || way === "by") && (
            <Field label={way === "by" ? "Records (− is back)" : "Offset"}>
              <input
                inputMode="numeric"
                required
                value={given}
                onInput={(event) => changed(setGiven, event.currentTarget.value)}
              />
            </Field>
          )}
          <Field label="Topic">
            <select
              value={topic}
              onChange={(event) => changed(setTopic, event.currentTarget.value)}
              disabled={plan?.executed}
            >
              {topics.length !== 1 && <option value="">all topics</option>}
              {topics.map((each) => (
                <option key={each}>{each}</option>
              ))}
            </select>
          </Field>
        </div>
        {group.members.length > 0 && !plan?.executed && (
          <p class="soft">
            {plural(group.members.length, "member")} read now. If the gateway refuses for that, stop them first.
          </p>
        )}
        {error !== null && <Failure error={error} />}
        {plan && <Plan plan={plan} />}
        <footer>
          {plan?.executed ? (
            <button type="button" class="primary" onClick={onClose}>
              Close
            </button>
          ) : (
            <>
              <button type="submit" disabled={preview.busy || execute.busy} class={plan ? undefined : "primary"}>
                Preview
              </button>
              {plan && (
                <button type="button" class="danger" disabled={execute.busy} onClick={() => void execute.run()}>
                  Move {plural(plan.positions.length, "position")}
                </button>
              )}
            </>
          )}
        </footer>
      </form>
    </Dialog>
  );
}

/** How many more (or fewer) records are read than would be without. */
export function difference(moved: Moved): number {
  let sum = 0;
  for (const [lane, after] of Object.entries(moved.after)) sum += (moved.before[lane] ?? moved.start) - after;
  return sum;
}

function Plan({ plan }: { plan: GroupReset }) {
  const again = plan.positions.reduce((sum, each) => sum + Math.max(0, difference(each)), 0);
  const skipped = plan.positions.reduce((sum, each) => sum + Math.max(0, -difference(each)), 0);
  const effect = [again > 0 && `${count(again)} read again`, skipped > 0 && `${count(skipped)} skipped`]
    .filter(Boolean)
    .join(", ");
  return (
    <div class="plan">
      <p role="status">
        <strong>{plan.executed ? "Done." : "Nothing is changed yet."}</strong> Records: {effect || "no difference"}.
      </p>
      <Table
        label="Positions before and after"
        rows={plan.positions}
        rowKey={(each) => `${each.topic}/${each.partition}`}
        columns={[
          { name: "Partition", cell: (each) => `${each.topic}/${each.partition}` },
          { name: "Before", cell: (each) => <Positions committed={each.before} />, number: true },
          { name: "After", cell: (each) => <Positions committed={each.after} />, number: true },
          { name: "Log", cell: (each) => `${count(each.start)} … ${count(each.end)}`, number: true },
          { name: "Note", cell: (each) => each.note, grow: true },
        ]}
      />
    </div>
  );
}
