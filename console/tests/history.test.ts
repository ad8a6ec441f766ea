import { describe, expect, it } from "vitest";

import { KEPT, Meter, Series } from "../src/history";

describe("Meter", () => {
  it("makes rates of counters, and none of the first look", () => {
    const meter = new Meter();
    expect(meter.look(1000, new Map([["a", 10]]))).toBeNull();
    expect(meter.look(3000, new Map([["a", 30]]))).toBe(10);
  });

  it("counts nothing for a partition that is new, and nothing negative for one that began again", () => {
    const meter = new Meter();
    meter.look(0, new Map([["a", 100]]));
    const counters = new Map([
      ["a", 40],
      ["b", 1_000_000],
    ]);
    expect(meter.look(1000, counters)).toBe(0);
  });

  it("leaves out an answer that another one overtook", () => {
    const meter = new Meter();
    meter.look(2000, new Map([["a", 10]]));
    expect(meter.look(1000, new Map([["a", 5]]))).toBeNull();
    expect(meter.look(3000, new Map([["a", 20]]))).toBe(10);
  });
});

describe("Series", () => {
  it("says how fast it grows, and not before three looks", () => {
    const series = new Series();
    series.add(0, 100);
    series.add(2000, 120);
    expect(series.trend()).toBeNull();
    series.add(4000, 140);
    expect(series.trend()).toBeCloseTo(10);
  });

  it("looks back no further than asked", () => {
    const series = new Series();
    for (let at = 0; at <= 60_000; at += 2000) series.add(at, at < 30_000 ? at : 30_000);
    expect(series.trend(10_000)).toBeCloseTo(0);
  });

  it("keeps the last only", () => {
    const series = new Series();
    for (let i = 0; i < KEPT + 10; i += 1) series.add(i, i);
    expect(series.times).toHaveLength(KEPT);
    expect(series.times[0]).toBe(10);
  });
});
