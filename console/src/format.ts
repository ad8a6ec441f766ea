/** Numbers, sizes and times as people read them. Widths change as little as can be: figures are tabular. */

const whole = new Intl.NumberFormat("en-US");
const compact = new Intl.NumberFormat("en-US", { notation: "compact", maximumFractionDigits: 1 });

export function count(value: number | null | undefined): string {
  return value == null ? "–" : whole.format(value);
}

/** For where room is short: 12.3K. Exact below ten thousand. */
export function short(value: number): string {
  return Math.abs(value) < 10_000 ? whole.format(Math.round(value)) : compact.format(value);
}

export function rate(perSecond: number | null | undefined): string {
  if (perSecond == null) return "–";
  if (perSecond !== 0 && perSecond < 10) return perSecond.toFixed(1);
  return short(perSecond);
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export function bytes(value: number | null | undefined): string {
  if (value == null) return "–";
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${UNITS[unit] ?? ""}`;
}

/** How long: 850 ms, 12 s, 3 min 20 s, 5 h 2 min, 4 d 1 h. */
export function duration(ms: number | null | undefined): string {
  if (ms == null) return "–";
  if (ms < 1000) return `${Math.max(0, Math.round(ms))} ms`;
  const seconds = Math.floor(ms / 1000);
  if (seconds < 60) return `${seconds} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return two(minutes, "min", seconds % 60, "s");
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return two(hours, "h", minutes % 60, "min");
  return two(Math.floor(hours / 24), "d", hours % 24, "h");
}

function two(big: number, unit: string, small: number, smaller: string): string {
  return small === 0 ? `${big} ${unit}` : `${big} ${unit} ${small} ${smaller}`;
}

/** Local time with milliseconds, in a form that sorts. */
export function time(ms: number): string {
  const date = new Date(ms);
  if (Number.isNaN(date.getTime())) return String(ms);
  const two = (value: number): string => String(value).padStart(2, "0");
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  const clock = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return `${day} ${clock}.${String(date.getMilliseconds()).padStart(3, "0")}`;
}

export function plural(number: number, one: string, many = `${one}s`): string {
  return `${count(number)} ${number === 1 ? one : many}`;
}
