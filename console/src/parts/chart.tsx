/** Charts: a figure over the last minutes (uPlot), and its small sister for tables (SVG). */

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

import { short } from "../format";
import type { Series } from "../history";
import { theme } from "../theme";

const LEAST_S = 60;
const MOST_S = 300;

interface ChartProps {
  series: Series;
  /** Of the newest look: another one, another drawing. */
  at_ms: number;
  label: string;
  format?: (value: number) => string;
  height?: number;
}

export function Chart({ series, at_ms, label, format = short, height = 180 }: ChartProps) {
  const box = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const look = theme.value;

  useEffect(() => {
    const element = box.current;
    if (!element) return;
    const style = getComputedStyle(element);
    const colour = (name: string): string => style.getPropertyValue(name).trim();
    const axis = {
      stroke: colour("--soft"),
      grid: { stroke: colour("--line"), width: 1 },
      ticks: { show: false },
      font: "11px system-ui",
    };
    const made = new uPlot(
      {
        width: Math.max(200, element.clientWidth),
        height,
        legend: { show: false },
        padding: [8, 26, 0, 0],
        cursor: { y: false, points: { size: 6 } },
        scales: {
          x: {
            time: true,
            range: (_, least, most) => [most - Math.min(MOST_S, Math.max(LEAST_S, most - least)), most],
          },
          y: { range: (_, __, most) => [0, Math.max(1, most * 1.15)] },
        },
        axes: [
          {
            ...axis,
            size: 26,
            space: 90,
            values: (_, marks) => marks.map((mark) => new Date(mark * 1000).toTimeString().slice(0, 8)),
          },
          { ...axis, size: 68, values: (_, marks) => marks.map((mark) => format(mark)) },
        ],
        series: [
          {},
          {
            label,
            stroke: colour("--accent"),
            width: 2,
            fill: colour("--accent-wash"),
            // A figure that was looked at once has no line yet: it is a dot.
            points: { show: (of) => (of.data[1] ?? []).filter((each) => each != null).length === 1, size: 7 },
            spanGaps: false,
          },
        ],
      },
      [[], []],
      element,
    );
    plot.current = made;
    const resize = new ResizeObserver(() => made.setSize({ width: Math.max(200, element.clientWidth), height }));
    resize.observe(element);
    return () => {
      resize.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [height, label, look, format]);

  useEffect(() => {
    plot.current?.setData([series.times.map((each) => each / 1000), series.values]);
  }, [series, at_ms, look, height, label, format]);

  const last = series.last;
  const told = last === null ? "not known yet" : format(last);
  return <div class="chart" ref={box} role="img" aria-label={`${label}: ${told}`} style={{ height: `${height}px` }} />;
}

/** The last minutes in a table's cell. Without figures: the cell beside has them. */
export function Spark({ series, points = 60 }: { series: Series; points?: number }) {
  const values = series.values.slice(-points);
  const most = Math.max(1, ...values.map((value) => value ?? 0));
  const [width, height] = [88, 22];
  const step = width / Math.max(1, points - 1);
  const start = points - values.length;
  let line = "";
  let pen = "M";
  values.forEach((value, i) => {
    if (value === null) {
      pen = "M";
      return;
    }
    line += `${pen}${((start + i) * step).toFixed(1)} ${(height - 1 - (value / most) * (height - 3)).toFixed(1)}`;
    pen = "L";
  });
  return (
    <svg class="spark" width={width} height={height} viewBox={`0 0 ${width} ${height}`} aria-hidden="true">
      <path d={line || "M0 0"} />
    </svg>
  );
}
