/** Values of records as people read them: JSON, text, Avro, hex. Digits are shown as they are stored. */

import { avro } from "./avro";
import type { RecordOut } from "./types";

export type Form = "auto" | "json" | "text" | "avro" | "hex";

interface Valued {
  value?: unknown;
  text?: string;
  base64?: string;
}

/** The gateway is asked for text, so that a number of JSON that JavaScript cannot hold keeps its digits. */
export function textOf(record: Valued): string | null {
  if (record.text !== undefined) return record.text;
  return record.value === undefined ? null : JSON.stringify(record.value);
}

export function bytesOf(record: Valued): Uint8Array | null {
  if (record.base64 !== undefined) return fromBase64(record.base64);
  const text = textOf(record);
  return text === null ? null : new TextEncoder().encode(text);
}

export function fromBase64(text: string): Uint8Array {
  return Uint8Array.from(atob(text), (each) => each.charCodeAt(0));
}

export function isJson(text: string): boolean {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

export interface Shown {
  form: "none" | "json" | "text" | "avro" | "hex";
  text: string;
  problem?: string;
}

export function show(record: Valued, form: Form, schema = ""): Shown {
  const bytes = bytesOf(record);
  if (bytes === null) return { form: "none", text: "" };
  const text = textOf(record);
  if (form === "avro") {
    try {
      return { form: "avro", text: avro(schema, bytes) };
    } catch (error) {
      return { form: "hex", text: hex(bytes), problem: `Not Avro of this schema: ${(error as Error).message}` };
    }
  }
  if (form === "hex" || text === null) {
    const problem = form === "json" || form === "text" ? { problem: "These bytes are not UTF-8." } : {};
    return { form: "hex", text: hex(bytes), ...problem };
  }
  if (form === "text") return { form: "text", text };
  if (isJson(text)) return { form: "json", text: indent(text) };
  return form === "json" ? { form: "text", text, problem: "This is not JSON." } : { form: "text", text };
}

/** One line of a value, for a table. */
export function preview(record: Valued, most = 240): string {
  const text = textOf(record);
  if (text !== null) return text.slice(0, most).replace(/\s+/g, " ");
  const bytes = bytesOf(record);
  return bytes === null ? "" : [...bytes.slice(0, 32)].map(byte).join(" ") + (bytes.length > 32 ? " …" : "");
}

const byte = (value: number): string => value.toString(16).padStart(2, "0");

export function hex(bytes: Uint8Array, most = 4096): string {
  const lines = [];
  for (let at = 0; at < Math.min(bytes.length, most); at += 16) {
    const part = [...bytes.slice(at, at + 16)];
    const letters = part.map((each) => (each >= 32 && each < 127 ? String.fromCharCode(each) : "·")).join("");
    lines.push(`${at.toString(16).padStart(8, "0")}  ${part.map(byte).join(" ").padEnd(47)}  ${letters}`);
  }
  if (bytes.length > most) lines.push(`… ${bytes.length - most} bytes more`);
  return lines.join("\n");
}

/** JSON text with line ends and indents; every token as it is. */
export function indent(json: string): string {
  const tokens = json.match(/"(?:[^"\\]|\\.)*"|[[\]{}:,]|[^\s[\]{}:,"]+/g) ?? [];
  let depth = 0;
  let made = "";
  const line = (): string => `\n${"  ".repeat(depth)}`;
  tokens.forEach((token, i) => {
    const empty = (token === "{" && tokens[i + 1] === "}") || (token === "[" && tokens[i + 1] === "]");
    const closesEmpty = (token === "}" && tokens[i - 1] === "{") || (token === "]" && tokens[i - 1] === "[");
    if (token === "{" || token === "[") {
      depth += 1;
      made += empty ? token : token + line();
    } else if (token === "}" || token === "]") {
      depth -= 1;
      made += closesEmpty ? token : line() + token;
    } else if (token === ",") made += token + line();
    else made += token === ":" ? ": " : token;
  });
  return made;
}

// -- filters ------------------------------------------------------------------------------------------

export type Match = (record: RecordOut) => boolean;

const COMPARISON = /^([\w.[\]-]+)\s*(=|!=|<=|>=|<|>)\s*(.+)$/;

/** `text` anywhere in key, value or headers; or a comparison with a field of JSON: `order.total > 10`. */
export function filter(text: string): Match {
  const asked = text.trim();
  if (asked === "") return () => true;
  const parts = COMPARISON.exec(asked);
  if (parts) {
    const [, field = "", sign = "", wanted = ""] = parts;
    return (record) => compare(at(parsed(record), field), sign, wanted.replace(/^"(.*)"$/, "$1"));
  }
  const low = asked.toLowerCase();
  return (record) =>
    [record.key ?? "", textOf(record) ?? "", ...Object.entries(record.headers ?? {}).flat()].some((each) =>
      each.toLowerCase().includes(low),
    );
}

function parsed(record: RecordOut): unknown {
  try {
    return JSON.parse(textOf(record) ?? "null");
  } catch {
    return undefined;
  }
}

function at(value: unknown, field: string): unknown {
  for (const name of field.split(/[.[\]]+/).filter(Boolean)) {
    if (typeof value !== "object" || value === null || !Object.hasOwn(value, name)) return undefined;
    value = (value as Record<string, unknown>)[name];
  }
  return value;
}

function compare(found: unknown, sign: string, wanted: string): boolean {
  if (found === undefined || (typeof found === "object" && found !== null)) return false;
  if (sign === "=") return String(found) === wanted;
  if (sign === "!=") return String(found) !== wanted;
  const numbers = typeof found === "number" && wanted !== "" && !Number.isNaN(Number(wanted));
  const [a, b] = numbers ? [found, Number(wanted)] : [String(found), wanted];
  if (sign === "<") return a < b;
  if (sign === ">") return a > b;
  return sign === "<=" ? a <= b : a >= b;
}
