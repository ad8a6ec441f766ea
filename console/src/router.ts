/** The address after `#`: `#/topics/orders/records?offset=5`. */

import { signal } from "@preact/signals";

export interface Place {
  parts: string[];
  params: URLSearchParams;
}

export function parse(hash: string): Place {
  const [way = "", params = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  return { parts: way.split("/").filter(Boolean).map(decoded), params: new URLSearchParams(params) };
}

function decoded(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

export const place = signal<Place>(parse(location.hash));
addEventListener("hashchange", () => (place.value = parse(location.hash)));

export function go(hash: string): void {
  location.hash = hash;
}

/** `to("topics", name)` is `#/topics/NAME`. */
export function to(...parts: (string | number)[]): string {
  return `#/${parts.map((part) => encodeURIComponent(String(part))).join("/")}`;
}
