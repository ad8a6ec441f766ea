import { describe, expect, it } from "vitest";

import { World } from "../fixtures/world";
import { problemsOf } from "../src/problems";
import type { Overview } from "../src/types";

function looked(change: (world: World) => void = () => undefined): Overview {
  const world = new World(() => 1_763_460_000_000);
  change(world);
  return world.overview();
}

describe("problemsOf", () => {
  it("finds nothing wrong with a cluster that is well", () => {
    expect(problemsOf(looked()).filter((each) => each.severity !== "note")).toEqual([]);
  });

  it("says which broker is away and what that costs", () => {
    const found = problemsOf(looked((world) => (world.away = "b2")));
    expect(found[0]).toMatchObject({ severity: "warning", what: "Broker b2 is away" });
    expect(found.some((each) => each.what === "orders/0 has 1 replica out of service" && each.why.includes("b2"))).toBe(
      true,
    );
  });

  it("puts a partition without a leader first, with its reason", () => {
    const overview = looked((world) => (world.away = "b2"));
    const partition = overview.topics[0]?.partitions[1];
    if (!partition) throw new Error("the fixture has changed");
    partition.leader = null;
    for (const replica of partition.replicas.slice(0, 2)) replica.problem = "its disk is lost";
    const [first] = problemsOf(overview);
    expect(first?.severity).toBe("critical");
    expect(first?.what).toBe("orders/1 has no leader: reads and writes wait");
    expect(first?.why).toContain("1 of 3 replicas answer, and 2 are needed");
    expect(first?.why).toContain("its disk is lost");
  });

  it("tells of groups that nobody reads for", () => {
    expect(problemsOf(looked()).map((each) => each.what)).toContain(
      "Group nightly-report has no members and 1,000,000 records to read",
    );
  });
});
