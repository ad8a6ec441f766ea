/** The gateway, asked over its own origin. The key is kept for this tab only, and goes nowhere but into the header. */

import { signal } from "@preact/signals";

const KEY = "rayqueue.key";
const TIMEOUT_MS = 35_000; // the gateway gives up on a request after 30 s, and says so

export class ApiError extends Error {
  constructor(
    /** 0: no answer at all. */
    readonly status: number,
    readonly code: string,
    readonly title: string,
    readonly detail: string,
    readonly retriable: boolean,
  ) {
    super(detail || title);
  }

  /** The gateway does not have this route: it is older than the page, or has this part not yet. */
  get missing(): boolean {
    return this.code === "unknown_route" || this.code === "unknown_method" || this.status === 501;
  }
}

function stored(): string {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // storage is forbidden here: the key lives as long as the page
  }
}

const key = signal(stored());

/** The gateway wants a key, or another one. */
export const keyWanted = signal(false);
export const hasKey = (): boolean => key.value !== "";

export function setKey(given: string): void {
  key.value = given.trim();
  keyWanted.value = false;
  try {
    if (key.value) sessionStorage.setItem(KEY, key.value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // see stored()
  }
}

function headers(body: boolean): Record<string, string> {
  const made: Record<string, string> = { Accept: "application/json" };
  if (key.value) made["Authorization"] = `Bearer ${key.value}`;
  if (body) made["Content-Type"] = "application/json";
  return made;
}

/** A path with its parts escaped: path`/v1/topics/${name}`. */
export function path(texts: TemplateStringsArray, ...parts: (string | number)[]): string {
  return texts.reduce((made, text, i) => made + encodeURIComponent(String(parts[i - 1])) + text);
}

export function query(params: Record<string, string | number | null | undefined>): string {
  const given = Object.entries(params).filter(([, value]) => value != null);
  return given.length === 0 ? "" : `?${new URLSearchParams(given.map(([name, value]) => [name, String(value)]))}`;
}

async function ask(method: string, url: string, body: unknown, signal: AbortSignal): Promise<Response> {
  let answer: Response;
  try {
    answer = await fetch(url, {
      method,
      headers: headers(body !== undefined),
      body: body === undefined ? null : JSON.stringify(body),
      signal,
      cache: "no-store",
      credentials: "omit",
    });
  } catch (error) {
    if (signal.aborted && (signal.reason as Error | undefined)?.name !== "TimeoutError") throw error;
    throw new ApiError(0, "unreachable", "The gateway does not answer", "Is it running? Retrying by itself.", true);
  }
  if (!answer.ok) throw await problem(answer);
  return answer;
}

async function problem(answer: Response): Promise<ApiError> {
  const told = (await answer.json().catch(() => ({}))) as Partial<Record<string, unknown>>;
  const text = (name: string, otherwise: string): string =>
    typeof told[name] === "string" ? (told[name] as string) : otherwise;
  if (answer.status === 401) keyWanted.value = true;
  return new ApiError(
    answer.status,
    text("code", answer.status === 404 ? "unknown_route" : `http_${answer.status}`),
    text("title", answer.statusText || `Status ${answer.status}`),
    text("detail", ""),
    told["retriable"] === true,
  );
}

async function call<T>(method: string, url: string, body?: unknown, signal?: AbortSignal): Promise<T> {
  const deadline = AbortSignal.timeout(TIMEOUT_MS);
  const answer = await ask(method, url, body, signal ? AbortSignal.any([signal, deadline]) : deadline);
  return (answer.status === 204 ? undefined : await answer.json()) as T;
}

export const api = {
  get: <T>(url: string, signal?: AbortSignal): Promise<T> => call<T>("GET", url, undefined, signal),
  post: <T>(url: string, body: unknown, signal?: AbortSignal): Promise<T> => call<T>("POST", url, body, signal),
  patch: <T>(url: string, body: unknown): Promise<T> => call<T>("PATCH", url, body),
  delete: (url: string): Promise<unknown> => call<unknown>("DELETE", url),
};

/** Server-sent events. `EventSource` can send no key, so the stream is read by hand. */
export async function* events(url: string, signal: AbortSignal): AsyncGenerator<{ event: string; data: string }> {
  const answer = await ask("GET", url, undefined, signal);
  if (!answer.body) return;
  const parser = new EventParser();
  for await (const text of answer.body.pipeThrough(new TextDecoderStream())) yield* parser.feed(text);
}

/** The parser of `text/event-stream`, for as much of it as the gateway sends. */
export class EventParser {
  #rest = "";

  feed(text: string): { event: string; data: string }[] {
    const blocks = (this.#rest + text).split("\n\n");
    this.#rest = blocks.pop() ?? "";
    const found = [];
    for (const block of blocks) {
      let event = "message";
      const data: string[] = [];
      for (const line of block.split("\n")) {
        if (line.startsWith("event:")) event = line.slice(6).trim();
        else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      }
      if (data.length > 0) found.push({ event, data: data.join("\n") });
    }
    return found;
  }
}
