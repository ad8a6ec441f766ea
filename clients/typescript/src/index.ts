export {
  type AppendOptions,
  RayQueue,
  type QueueSettings,
  type RayQueueOptions,
  type TopicSettings,
} from "./client.js";
export { RayQueueError } from "./errors.js";
export { Producer } from "./producer.js";
export {
  DeadJob,
  type Failure,
  Job,
  JobResult,
  type JobsOptions,
  type JobState,
  type NewJob,
  type NewResult,
  PeekedJob,
  type PutJob,
  type QueueSize,
  WorkQueue,
} from "./queue.js";
export { type Bytes, type Isolation, type NewContents, type NewRecord, QueueRecord, type Written } from "./records.js";
export type { ReceivedRecord, SubscribeOptions } from "./subscription.js";
