/** Tables that sort and filter. Rows that are links work by mouse and by keyboard, and open in tabs. */

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";

export interface Column<T> {
  name: string;
  cell: (row: T) => ComponentChildren;
  /** What it is sorted by; without it, it is not. */
  by?: (row: T) => number | string;
  number?: boolean;
  /** Takes what room is left, and is cut rather than wrapped. */
  grow?: boolean;
}

export function Table<T>(props: {
  label: string;
  columns: Column<T>[];
  rows: T[];
  rowKey: (row: T) => string;
  sorted?: [string, "up" | "down"];
  selected?: (row: T) => boolean;
}) {
  const [order, setOrder] = useState(props.sorted);
  const column = order && props.columns.find((each) => each.name === order[0]);
  const by = column?.by;
  const rows =
    by && order ? [...props.rows].sort((a, b) => compared(by(a), by(b)) * (order[1] === "up" ? 1 : -1)) : props.rows;
  return (
    <div class="table" tabIndex={-1}>
      <table aria-label={props.label}>
        <thead>
          <tr>
            {props.columns.map((each) => (
              <th
                key={each.name}
                class={kind(each)}
                scope="col"
                aria-sort={order?.[0] === each.name ? (order[1] === "up" ? "ascending" : "descending") : undefined}
              >
                {each.by ? (
                  <button
                    type="button"
                    onClick={() =>
                      setOrder([
                        each.name,
                        order?.[0] === each.name ? (order[1] === "up" ? "down" : "up") : each.number ? "down" : "up",
                      ])
                    }
                  >
                    {each.number && <Arrow way={order?.[0] === each.name ? order[1] : undefined} />}
                    {each.name}
                    {!each.number && <Arrow way={order?.[0] === each.name ? order[1] : undefined} />}
                  </button>
                ) : (
                  each.name
                )}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={props.rowKey(row)} aria-selected={props.selected?.(row)}>
              {props.columns.map((each) => (
                <td key={each.name} class={kind(each)}>
                  {each.cell(row)}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Arrow({ way }: { way: "up" | "down" | undefined }) {
  return (
    <span class="arrow" aria-hidden="true">
      {way === "up" ? "↑" : way === "down" ? "↓" : ""}
    </span>
  );
}

function kind<T>(column: Column<T>): string | undefined {
  return column.number ? "number" : column.grow ? "grow" : undefined;
}

function compared(a: number | string, b: number | string): number {
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}
