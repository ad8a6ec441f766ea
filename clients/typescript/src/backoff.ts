/** Pauses between attempts, and the one loop that repeats calls. */

import { RayQueueError } from "./errors.js";

const PAUSES_MS = [100, 200, 500, 1000, 2000, 5000];

/** The pause after so many failures in a row, with jitter. */
export function backoffMs(failures: number): number {
  return (PAUSES_MS[Math.min(failures, PAUSES_MS.length - 1)] ?? 5000) * (0.5 + Math.random() / 2);
}

/** Calls until it is answered, or `timeoutMs` is over. It is repeated after `retriable` errors, if it `mayRepeat`. */
export async function retried<T>(
  timeoutMs: number,
  mayRepeat: boolean,
  call: (timeoutMs: number) => Promise<T>,
): Promise<T> {
  const deadline = Date.now() + timeoutMs;
  for (let failures = 0; ; failures += 1) {
    try {
      return await call(Math.max(1, Math.ceil(deadline - Date.now()))); // gRPC's timeouts are whole numbers
    } catch (problem) {
      const error = RayQueueError.of(problem);
      const pause_ms = backoffMs(failures);
      if (!mayRepeat || !error.retriable || Date.now() + pause_ms >= deadline) throw error;
      await new Promise((resolve) => setTimeout(resolve, pause_ms));
    }
  }
}
