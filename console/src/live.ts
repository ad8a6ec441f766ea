/** The live cluster: one look every two seconds while the page is seen; what pages show is made of these looks. */

import { computed, signal } from "@preact/signals";

import { api, ApiError, keyWanted, path } from "./api";
import { Meter, SeriesMap } from "./history";
import { problemsOf } from "./problems";
import type { ClusterInfo, GroupDetail, GroupSummary, Overview, TopicDetail, TopicSummary } from "./types";

export const LOOK_MS = 2000;
const AT_ONCE = 4;

export const overview = signal<Overview | null>(null);
export const failure = signal<ApiError | null>(null);
export const problems = computed(() => (overview.value === null ? [] : problemsOf(overview.value)));

/** `in`: records per second of all topics; `in/TOPIC`; `lag/GROUP`; `lag`. */
export const history = new SeriesMap();
const meters = new Map<string, Meter>();

export function took(look: Overview): void {
  const names = new Set(["in", "lag"]);
  const all = new Map<string, number>();
  const meter = (name: string, counters: Map<string, number>): void => {
    names.add(name);
    let found = meters.get(name);
    if (!found) meters.set(name, (found = new Meter()));
    history.of(name).add(look.now_ms, found.look(look.now_ms, counters));
  };
  for (const topic of look.topics) {
    // A partition whose leader is away says no end: then it has no growth, rather than a fall and a jump.
    const ends = topic.partitions.filter((each) => each.leader !== null);
    const counters = new Map(ends.map((each) => [`${topic.name}/${each.number}`, each.end_offset]));
    for (const [name, end] of counters) all.set(name, end);
    meter(`in/${topic.name}`, counters);
  }
  meter("in", all);
  let lag = 0;
  for (const group of look.groups) {
    names.add(`lag/${group.group}`);
    history.of(`lag/${group.group}`).add(look.now_ms, group.lag);
    lag += group.lag ?? 0;
  }
  history.of("lag").add(look.now_ms, lag);
  history.keep(names);
  for (const name of meters.keys()) if (!names.has(name)) meters.delete(name);
  overview.value = look;
  failure.value = null;
}

let together: boolean | null = null;

/** One look at everything: by one request if the gateway has it, by several otherwise. */
export async function look(abort: AbortSignal): Promise<Overview> {
  if (together !== false) {
    try {
      const found = await api.get<Overview>("/v1/overview", abort);
      together = true;
      return found;
    } catch (error) {
      if (!(error instanceof ApiError && error.missing)) throw error;
      together = false;
    }
  }
  const [cluster, { topics }, { groups }, ready] = await Promise.all([
    api.get<ClusterInfo>("/v1/cluster", abort),
    api.get<{ topics: TopicSummary[] }>("/v1/topics", abort),
    api.get<{ groups: GroupSummary[] }>("/v1/groups", abort),
    api.get<{ gateway: string; version: string }>("/readyz", abort),
  ]);
  const details = await some(topics, (each) => api.get<TopicDetail>(path`/v1/topics/${each.name}`, abort));
  const lags = await some(groups, (each) => api.get<GroupDetail>(path`/v1/groups/${each.group}`, abort));
  return {
    now_ms: Date.now(),
    gateway: ready.gateway,
    version: ready.version,
    cluster,
    topics: details.map(({ name, partitions }) => ({ name, kind: "log", partitions })),
    groups: lags.map((each) => ({
      group: each.group,
      state: each.state,
      members: each.members.length,
      lag: each.lag,
      topics: [...new Set(each.partitions.map(({ topic }) => topic))],
    })),
  };
}

/** A few at a time. What was deleted meanwhile is left out. */
async function some<A, B>(items: A[], of: (item: A) => Promise<B>): Promise<B[]> {
  const found: (B | null)[] = new Array<B | null>(items.length).fill(null);
  let next = 0;
  async function work(): Promise<void> {
    while (next < items.length) {
      const at = next++;
      try {
        found[at] = await of(items[at] as A);
      } catch (error) {
        if (!(error instanceof ApiError && error.status === 404)) throw error;
      }
    }
  }
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  return found.filter((each) => each !== null);
}

let wake: (() => void) | null = null;

/** Look now, not in two seconds: after a change, or with another key. */
export function refresh(): void {
  wake?.();
}

export async function watch(abort: AbortSignal): Promise<void> {
  document.addEventListener("visibilitychange", () => document.hidden || refresh(), { signal: abort });
  while (!abort.aborted) {
    if (!document.hidden && !keyWanted.value) {
      try {
        took(await look(abort));
      } catch (error) {
        if (abort.aborted) return;
        if (!(error instanceof ApiError)) throw error;
        failure.value = error;
      }
    }
    await new Promise<void>((resolve) => {
      const timer = setTimeout(resolve, LOOK_MS);
      wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
