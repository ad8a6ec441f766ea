/** What is wrong with a cluster, why, and what helps: read off one overview. */

import { count, plural } from "./format";
import type { Overview, Partition, Replica } from "./types";

export type Severity = "critical" | "warning" | "note";

export interface Problem {
  severity: Severity;
  what: string;
  why: string;
  /** Where in the console it can be looked at. */
  link: string;
}

/** A follower that is so far behind its leader is worth a word. */
export const FAR_BEHIND = 10_000;

export const broken = (replica: Replica): boolean => replica.problem !== null || replica.role === "absent";

/** Records that a replica has not, of those that its leader has committed. */
export function behind(partition: Partition, replica: Replica): number | null {
  return replica.high_watermark === null ? null : Math.max(0, partition.end_offset - replica.high_watermark);
}

export function problemsOf(overview: Overview): Problem[] {
  const found = [...brokers(overview), ...partitions(overview), ...repairs(overview), ...groups(overview)];
  const order: Severity[] = ["critical", "warning", "note"];
  return found.sort((a, b) => order.indexOf(a.severity) - order.indexOf(b.severity));
}

function* brokers({ cluster }: Overview): Generator<Problem> {
  for (const broker of cluster.brokers) {
    const name = `Broker ${broker.broker}`;
    if (!broker.alive) {
      const why = `Its Ray node is gone or does not answer. ${plural(broker.replicas, "replica")} of it serve nobody until it comes back or they are replaced.`;
      yield { severity: broker.replicas > 0 ? "warning" : "note", what: `${name} is away`, why, link: "#/" };
    } else if (broker.draining) {
      const left = broker.replicas === 0 ? "It is empty." : `${plural(broker.replicas, "replica")} are still to move.`;
      yield { severity: "note", what: `${name} is being emptied`, why: left, link: "#/" };
    } else if (broker.room === 0) {
      yield { severity: "warning", what: `${name} is full`, why: "It takes no more replicas.", link: "#/" };
    }
  }
}

function* partitions({ topics }: Overview): Generator<Problem> {
  for (const topic of topics) {
    const link = `#/topics/${encodeURIComponent(topic.name)}`;
    for (const partition of topic.partitions) {
      const name = `${topic.name}/${partition.number}`;
      const bad = partition.replicas.filter(broken);
      const reasons = bad.map((each) => `${each.broker}: ${each.problem ?? "does not answer"}`).join("; ");
      if (partition.leader === null) {
        const needed = Math.floor(partition.replicas.length / 2) + 1;
        const left = partition.replicas.length - bad.length;
        const why =
          left < needed
            ? `${left} of ${partition.replicas.length} replicas answer, and ${needed} are needed. ${reasons}`
            : "Its replicas are electing one; this takes a second or two.";
        yield { severity: "critical", what: `${name} has no leader: reads and writes wait`, why, link };
      } else if (bad.length > 0) {
        yield {
          severity: "warning",
          what: `${name} has ${plural(bad.length, "replica")} out of service`,
          why: reasons,
          link,
        };
      }
      for (const replica of partition.replicas) {
        const missing = behind(partition, replica);
        if (!broken(replica) && missing !== null && missing > FAR_BEHIND) {
          const what = `${name}: the copy on ${replica.broker} is ${count(missing)} records behind`;
          yield { severity: "note", what, why: "It catches up by itself; until then it cannot lead.", link };
        }
      }
    }
    const shared = [...new Set(topic.partitions.flatMap((each) => each.shared_brokers ?? []))];
    if (shared.length > 0) {
      const what = `${topic.name} has several copies of a partition on ${shared.join(", ")}`;
      yield { severity: "note", what, why: "They survive the end of a process, not of that node. Add nodes.", link };
    }
  }
}

function* repairs({ cluster }: Overview): Generator<Problem> {
  for (const lost of cluster.lost)
    yield {
      severity: "warning",
      what: `Replica ${lost.replica_id} of ${lost.group_id} has lost its data`,
      why: lost.why,
      link: "#/",
    };
  for (const move of cluster.moves) {
    const what = `${move.topic}/${move.partition} gets a copy on ${move.broker}`;
    yield {
      severity: "note",
      what,
      why: `${move.why} (${move.reason})`,
      link: `#/topics/${encodeURIComponent(move.topic)}`,
    };
  }
}

function* groups({ groups }: Overview): Generator<Problem> {
  for (const group of groups) {
    if (group.members > 0 || !group.lag) continue;
    const what = `Group ${group.group} has no members and ${plural(group.lag, "record")} to read`;
    const link = `#/groups/${encodeURIComponent(group.group)}`;
    yield { severity: "note", what, why: "Nobody reads for it now. Its positions are kept.", link };
  }
}
