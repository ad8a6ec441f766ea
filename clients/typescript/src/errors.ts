/** What went wrong, in RayQueue's words: a stable code, and whether the same may be asked again. */

import { Code, ConnectError } from "@connectrpc/connect";

import { ErrorInfoSchema } from "./gen/google/rpc/error_details_pb.js";
import type { Problem } from "./gen/rayqueue/v1/common_pb.js";

export class RayQueueError extends Error {
  override readonly name = "RayQueueError";

  constructor(
    message: string,
    /** Stable, such as `unknown_topic`; docs/gateway.md of RayQueue lists them. */
    readonly code: string,
    /** Whether the same request may succeed later. After `outcome_unknown` it may also have been carried out. */
    readonly retriable: boolean,
    options?: ErrorOptions,
  ) {
    super(message, options);
  }

  static of(error: unknown): RayQueueError {
    if (error instanceof RayQueueError) return error;
    const told = ConnectError.from(error);
    const [info] = told.findDetails(ErrorInfoSchema);
    if (info)
      return new RayQueueError(told.rawMessage, info.reason, info.metadata["retriable"] === "true", { cause: error });
    // Nobody answered: the connection broke, or the deadline passed. What was asked may have been done.
    const unanswered =
      told.code === Code.Unavailable || told.code === Code.DeadlineExceeded || told.code === Code.Aborted;
    if (unanswered) return new RayQueueError(told.rawMessage, "outcome_unknown", true, { cause: error });
    return new RayQueueError(
      told.rawMessage,
      Code[told.code].replace(/(?<=[a-z])(?=[A-Z])/g, "_").toLowerCase(),
      false,
      { cause: error },
    );
  }

  static ofProblem(problem: Problem): RayQueueError {
    return new RayQueueError(problem.detail, problem.code, problem.retriable);
  }
}
