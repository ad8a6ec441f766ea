/** The last minutes of a figure, and rates made of counters. In memory of the page: a reload starts anew. */

export const KEPT = 450; // 15 minutes of one look every two seconds

export class Series {
  readonly times: number[] = [];
  readonly values: (number | null)[] = [];

  add(at_ms: number, value: number | null): void {
    const last = this.times.at(-1);
    if (last !== undefined && at_ms <= last) return; // an answer that another one overtook
    this.times.push(at_ms);
    this.values.push(value);
    if (this.times.length > KEPT) {
      this.times.shift();
      this.values.shift();
    }
  }

  get last(): number | null {
    return this.values.at(-1) ?? null;
  }

  /** Growth per second over the last `span_ms`, by least squares; null if that cannot be said yet. */
  trend(span_ms = 30_000): number | null {
    const newest = this.times.at(-1);
    if (newest === undefined) return null;
    const points: [number, number][] = [];
    for (let i = this.times.length - 1; i >= 0; i -= 1) {
      const at = this.times[i] as number;
      if (at < newest - span_ms) break;
      const value = this.values[i];
      if (value != null) points.push([(at - newest) / 1000, value]);
    }
    if (points.length < 3) return null;
    const mean = (of: 0 | 1): number => points.reduce((sum, point) => sum + point[of], 0) / points.length;
    const [x, y] = [mean(0), mean(1)];
    const spread = points.reduce((sum, [px]) => sum + (px - x) ** 2, 0);
    return spread === 0 ? null : points.reduce((sum, [px, py]) => sum + (px - x) * (py - y), 0) / spread;
  }
}

/** Growth per second of counters that come and go. One that was not there before counts from now on. */
export class Meter {
  #before: { at_ms: number; counters: Map<string, number> } | null = null;

  /** null for the first look, and for one that is no later than the last. */
  look(at_ms: number, counters: Map<string, number>): number | null {
    const before = this.#before;
    if (before !== null && at_ms <= before.at_ms) return null;
    this.#before = { at_ms, counters };
    if (before === null) return null;
    let grown = 0;
    for (const [name, value] of counters) grown += Math.max(0, value - (before.counters.get(name) ?? value));
    return (grown * 1000) / (at_ms - before.at_ms);
  }
}

export class SeriesMap {
  readonly #series = new Map<string, Series>();

  of(name: string): Series {
    let found = this.#series.get(name);
    if (!found) this.#series.set(name, (found = new Series()));
    return found;
  }

  /** Forgets what was not named since the last call. */
  keep(names: Set<string>): void {
    for (const name of this.#series.keys()) if (!names.has(name)) this.#series.delete(name);
  }
}
