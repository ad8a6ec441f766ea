/** The producer before a gateway that fails: a gRPC server of this test's own. */

import { createServer, type Http2Server } from "node:http2";
import type { AddressInfo } from "node:net";

import { Code, ConnectError } from "@connectrpc/connect";
import { connectNodeAdapter } from "@connectrpc/connect-node";
import { afterEach, describe, expect, it } from "vitest";

import { RecordService } from "../src/gen/rayqueue/v1/records_pb.js";
import { RayQueue } from "../src/index.js";

let server: Http2Server | null = null;
let rq: RayQueue | null = null;

afterEach(() => {
  rq?.close();
  server?.close();
});

/** Each stream fails so, once a batch has come, or at once. Returns how often one was opened, as it is counted. */
async function failing(code: Code, reads: boolean): Promise<{ streams: number }> {
  const seen = { streams: 0 };
  const handler = connectNodeAdapter({
    routes: (router) =>
      router.service(RecordService, {
        // eslint-disable-next-line require-yield
        async *produce(requests) {
          seen.streams += 1;
          if (reads) await requests[Symbol.asyncIterator]().next();
          throw new ConnectError("out of order", code);
        },
      }),
  });
  const listening = createServer(handler);
  server = listening;
  await new Promise<void>((resolve) => listening.listen(0, "127.0.0.1", resolve));
  rq = new RayQueue({ url: `http://127.0.0.1:${(listening.address() as AddressInfo).port}` });
  return seen;
}

describe("a producer whose stream breaks", () => {
  it("does not call what was under way failed: it may be written", async () => {
    await failing(Code.Internal, true);
    const producer = (rq as RayQueue).producer("orders");
    await expect(producer.send({ value: "x" })).rejects.toMatchObject({ code: "outcome_unknown", retriable: true });
    await producer.close();
  });

  it("knows that nothing was taken from whom nothing may be taken", async () => {
    await failing(Code.PermissionDenied, true);
    const producer = (rq as RayQueue).producer("orders");
    await expect(producer.send({ value: "x" })).rejects.toMatchObject({ code: "permission_denied", retriable: false });
    await producer.close();
  });

  it("opens another one after a pause that grows", async () => {
    const seen = await failing(Code.Unavailable, false);
    const producer = (rq as RayQueue).producer("orders");
    const until = Date.now() + 1500;
    let unknown = 0;
    while (Date.now() < until) {
      await producer.send({ value: "x" }).catch(() => (unknown += 1));
    }
    await producer.close();
    expect(seen.streams).toBeGreaterThan(1);
    expect(seen.streams).toBeLessThan(12);
    expect(unknown).toBeGreaterThan(0);
  });
});
