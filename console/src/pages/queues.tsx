/** Work queues: what is ready, leased, delayed and dead; dead letters looked at, sent back to work, or thrown away. */

import { useState } from "preact/hooks";

import { api, ApiError, path } from "../api";
import { count, duration, plural, time } from "../format";
import { LOOK_MS } from "../live";
import { Badge, Card, Dialog, Empty, Failure, Loading, Page, Tile, useAction, useAsked } from "../parts/basics";
import { Table } from "../parts/table";
import { to } from "../router";
import type { DeadJob, QueueSizes } from "../types";
import { preview } from "../values";
import { Value } from "./records";

function Missing({ error }: { error: unknown }) {
  if (!(error instanceof ApiError && error.missing)) return <Failure error={error} />;
  return (
    <Card>
      <Empty title="This gateway serves no work queues yet">
        The gateway that you asked has no routes for them. A newer one has; nothing is lost meanwhile.
      </Empty>
    </Card>
  );
}

export function QueuesPage() {
  const { data, error } = useAsked(
    (abort) => api.get<{ queues: QueueSizes[] }>("/v1/queues", abort),
    "queues",
    LOOK_MS,
  );
  return (
    <Page title="Queues">
      {!data ? (
        error ? (
          <Missing error={error} />
        ) : (
          <Loading />
        )
      ) : (
        <Card flush>
          {data.queues.length === 0 ? (
            <Empty title="There are no work queues yet">
              A queue hands each job to one worker, until it is acknowledged. <code>POST /v1/queues</code> and{" "}
              <code>rq.queue(name)</code> make one.
            </Empty>
          ) : (
            <Table
              label="Queues"
              rows={data.queues}
              rowKey={(each) => each.queue}
              sorted={["Queue", "up"]}
              columns={[
                {
                  name: "Queue",
                  cell: (each) => (
                    <>
                      <a href={to("queues", each.queue)}>{each.queue}</a>
                      {each.problem && <p class="soft">{each.problem}</p>}
                    </>
                  ),
                  by: (each) => each.queue,
                  grow: true,
                },
                {
                  name: "Partitions",
                  cell: (each) => count(each.partitions),
                  by: (each) => each.partitions,
                  number: true,
                },
                { name: "Ready", cell: (each) => count(each.ready), by: (each) => each.ready ?? -1, number: true },
                { name: "Leased", cell: (each) => count(each.leased), by: (each) => each.leased ?? -1, number: true },
                {
                  name: "Delayed",
                  cell: (each) => count(each.delayed),
                  by: (each) => each.delayed ?? -1,
                  number: true,
                },
                {
                  name: "Dead",
                  cell: (each) => (each.dead ? <Badge tone="warning">{count(each.dead)}</Badge> : count(each.dead)),
                  by: (each) => each.dead ?? -1,
                  number: true,
                },
              ]}
            />
          )}
        </Card>
      )}
    </Page>
  );
}

export function QueuePage({ name }: { name: string }) {
  const sizes = useAsked((abort) => api.get<QueueSizes>(path`/v1/queues/${name}`, abort), name, LOOK_MS);
  const dead = useAsked(
    (abort) => api.get<{ jobs: DeadJob[] }>(path`/v1/queues/${name}/dead` + "?max=100&format=text", abort),
    name,
    LOOK_MS,
  );
  const { data } = sizes;
  if (!data) {
    return (
      <Page title={name} crumb={["Queues", "#/queues"]}>
        {sizes.error ? <Missing error={sizes.error} /> : <Loading />}
      </Page>
    );
  }
  return (
    <Page title={name} crumb={["Queues", "#/queues"]} actions={<a href={to("topics", name)}>its partitions</a>}>
      <div class="tiles">
        <Tile
          label="Ready"
          value={count(data.ready)}
          note={
            data.oldest_ready_ms != null
              ? `oldest waits ${duration(Date.now() - data.oldest_ready_ms)}`
              : "for whoever asks"
          }
        />
        <Tile label="Leased" value={count(data.leased)} note="being worked on" />
        <Tile label="Delayed" value={count(data.delayed)} note="waiting for their time" />
        <Tile label="Dead letters" value={count(data.dead)} note="given up" tone={data.dead ? "warning" : "good"} />
      </div>
      {dead.data ? (
        <DeadLetters
          queue={name}
          total={data.dead ?? 0}
          jobs={dead.data.jobs}
          changed={() => {
            dead.again();
            sizes.again();
          }}
        />
      ) : dead.error ? (
        <Failure error={dead.error} />
      ) : (
        <Loading />
      )}
    </Page>
  );
}

function DeadLetters(props: { queue: string; total: number; jobs: DeadJob[]; changed: () => void }) {
  const { queue, jobs } = props;
  const [chosen, setChosen] = useState<ReadonlySet<string>>(new Set());
  const [open, setOpen] = useState<DeadJob | null>(null);
  const [purging, setPurging] = useState(false);
  const [told, setTold] = useState("");
  const there = jobs.filter((each) => chosen.has(each.job_id)).map((each) => each.job_id);
  const which = there.length > 0 ? { jobs: there } : { all: true };
  const act = useAction(async (what: "redrive" | "purge") => {
    const answer = await api.post<{ redriven?: number; purged?: number }>(
      path`/v1/queues/${queue}/dead/${what}`,
      which,
    );
    setChosen(new Set());
    setPurging(false);
    setTold(
      what === "redrive"
        ? `${plural(answer.redriven ?? 0, "job")} sent back to work.`
        : `${plural(answer.purged ?? 0, "job")} thrown away.`,
    );
    props.changed();
  });
  function choose(id: string): void {
    const next = new Set(chosen);
    if (!next.delete(id)) next.add(id);
    setChosen(next);
  }
  const many = there.length > 0 ? plural(there.length, "job") : "all";
  return (
    <Card
      title="Dead letters"
      aside={
        props.total > 0 && (
          <>
            <button type="button" disabled={act.busy} onClick={() => void act.run("redrive")}>
              Redrive {many}
            </button>
            <button type="button" class="danger" disabled={act.busy} onClick={() => setPurging(true)}>
              Purge {many}…
            </button>
          </>
        )
      }
      flush
    >
      {act.error !== null && <Failure error={act.error} />}
      <p class="told" role="status">
        {told}
      </p>
      {jobs.length === 0 ? (
        <Empty title="No job was given up">
          A job that fails too often, or is rejected, is kept here with its reason.
        </Empty>
      ) : (
        <Table
          label="Dead letters"
          rows={jobs}
          rowKey={(each) => each.job_id}
          selected={(each) => chosen.has(each.job_id)}
          columns={[
            {
              name: "",
              cell: (each) => (
                <input
                  type="checkbox"
                  aria-label={`Choose ${each.job_id}`}
                  checked={chosen.has(each.job_id)}
                  onChange={() => choose(each.job_id)}
                />
              ),
            },
            {
              name: "Job",
              cell: (each) => (
                <button type="button" class="link" onClick={() => setOpen(each)}>
                  {each.job_id}
                </button>
              ),
            },
            { name: "Given up", cell: (each) => time(each.died_at_ms), by: (each) => each.died_at_ms },
            { name: "Tries", cell: (each) => count(each.deliveries), by: (each) => each.deliveries, number: true },
            {
              name: "Reason",
              cell: (each) => <span class="cut">{each.reason || "–"}</span>,
              by: (each) => each.reason,
            },
            { name: "Value", cell: (each) => <code>{preview(each)}</code>, grow: true },
          ]}
        />
      )}
      {open && (
        <Dialog title={`Job ${open.job_id}`} onClose={() => setOpen(null)} wide>
          <p>
            Given up {time(open.died_at_ms)} after {plural(open.deliveries, "try", "tries")}:{" "}
            {open.reason || "no reason was given"}
          </p>
          <Value record={open} headers={open.headers} />
          {open.history?.map((each, number, all) => (
            <details key={`${each.time_ms} ${each.kind}`} open={number === all.length - 1}>
              <summary>
                {time(each.time_ms)} · {each.kind} · <span title={each.worker}>{shortened(each.worker)}</span> ·{" "}
                {each.reason}
              </summary>
              {each.traceback && <pre>{each.traceback}</pre>}
            </details>
          ))}
        </Dialog>
      )}
      {purging && (
        <Dialog title={`Throw away ${there.length > 0 ? many : "all dead letters"}?`} onClose={() => setPurging(false)}>
          <p>They are gone for good.</p>
          <footer>
            <button type="button" autofocus onClick={() => setPurging(false)}>
              Keep them
            </button>
            <button type="button" class="danger" disabled={act.busy} onClick={() => void act.run("purge")}>
              Throw away
            </button>
          </footer>
        </Dialog>
      )}
    </Card>
  );
}

/** A worker's name, as far as it tells it from others. All of it is in its title. */
function shortened(worker: string): string {
  return worker.length > 24 ? `${worker.slice(0, 12)}…` : worker;
}
