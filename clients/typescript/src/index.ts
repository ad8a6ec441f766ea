export { type AppendOptions, RayQueue, type RayQueueOptions, type TopicSettings } from "./client.js";
export { RayQueueError } from "./errors.js";
export { Producer } from "./producer.js";
export { type Bytes, type NewRecord, QueueRecord, type Written } from "./records.js";
export type { ReceivedRecord, SubscribeOptions } from "./subscription.js";
