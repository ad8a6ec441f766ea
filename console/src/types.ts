/** The gateway's answers, as `rayqueue/gateway/rest/models.py` has them: what the console uses of them. */

export interface Replica {
  replica_id: string;
  broker: string;
  role: string;
  high_watermark: number | null;
  size_bytes: number | null;
  problem: string | null;
}

export interface Partition {
  number: number;
  leader: string | null;
  term: number;
  start_offset: number;
  end_offset: number;
  size_bytes: number;
  replicas: Replica[];
  shared_brokers?: string[];
}

export type SettingValue = number | boolean | string | null;

export interface TopicSummary {
  name: string;
  topic_id: number;
  partitions: number;
  settings: Record<string, SettingValue>;
}

export interface TopicDetail {
  name: string;
  topic_id: number;
  settings: Record<string, SettingValue>;
  records: number;
  size_bytes: number;
  partitions: Partition[];
}

export interface Member {
  member: string;
  instance: string | null;
  client: string;
  topics: string[];
}

export interface GroupSummary {
  group: string;
  generation: number;
  assignor: string;
  state: string;
  members: Member[];
  empty_since_ms: number | null;
  expires_at_ms: number | null;
}

export interface PartitionLag {
  topic: string;
  partition: number;
  member: string | null;
  committed: Record<string, number>;
  lag: number;
  pinned: boolean;
  /** The time of the first record that is not read; null: none is, or it is not known. */
  oldest_unread_ms?: number | null;
}

export interface GroupDetail extends GroupSummary {
  lag: number;
  /** Growth per second over the last minute in which somebody looked; null: it cannot be said yet. */
  lag_trend_per_s?: number | null;
  partitions: PartitionLag[];
}

export interface Moved {
  topic: string;
  partition: number;
  before: Record<string, number>;
  after: Record<string, number>;
  start: number;
  end: number;
  note: string;
}

export interface GroupReset {
  group: string;
  executed: boolean;
  positions: Moved[];
}

export interface Broker {
  broker: string;
  host: string;
  alive: boolean;
  replicas: number;
  room: number | null;
  draining: boolean;
  holds: number;
}

export interface ClusterInfo {
  cluster_id: string;
  coordinator: string;
  term: number;
  topics: number;
  partitions: number;
  groups: number;
  brokers: Broker[];
  moves: {
    topic: string;
    partition: number;
    remove: string;
    add: string;
    broker: string;
    reason: string;
    why: string;
  }[];
  lost: { group_id: string; replica_id: string; why: string }[];
}

/** One answer about everything: what the page shows is a function of it and of the ones before. */
export interface Overview {
  now_ms: number;
  gateway: string;
  version: string;
  cluster: ClusterInfo;
  topics: { name: string; kind: string; partitions: Partition[] }[];
  groups: {
    group: string;
    state: string;
    members: number;
    /** null: not known now. */
    lag: number | null;
    lag_trend_per_s?: number | null;
    topics: string[];
  }[];
}

export interface RecordOut {
  topic: string;
  partition: number;
  offset: number;
  lane: number;
  timestamp_ms: number;
  value?: unknown;
  text?: string;
  base64?: string;
  key?: string;
  key_base64?: string;
  headers?: Record<string, string>;
  headers_base64?: Record<string, string>;
}

export interface Published {
  topic: string;
  records: { partition: number; offset: number; timestamp_ms: number }[];
}

export interface QueueSizes {
  queue: string;
  partitions: number;
  /** null: its partitions do not answer; `problem` says why. */
  ready: number | null;
  leased: number | null;
  delayed: number | null;
  dead: number | null;
  problem?: string | null;
  oldest_ready_ms?: number | null;
}

export interface DeadJob {
  job_id: string;
  partition: number;
  reason: string;
  deliveries: number;
  died_at_ms: number;
  put_at_ms: number;
  key?: string;
  key_base64?: string;
  value?: unknown;
  text?: string;
  base64?: string;
  headers?: Record<string, string>;
  headers_base64?: Record<string, string>;
  history?: { time_ms: number; kind: string; worker: string; reason: string; traceback?: string }[];
}

export interface Setting {
  key: string;
  value: string;
  source: string;
  description?: string;
}
