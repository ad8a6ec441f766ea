/** Small parts that every page is made of. */

import type { ComponentChildren } from "preact";
import { useEffect, useId, useRef, useState } from "preact/hooks";

import { ApiError } from "../api";
import type { Severity } from "../problems";

export function Page(props: {
  title: string;
  crumb?: [string, string];
  actions?: ComponentChildren;
  children: ComponentChildren;
}) {
  const { title, crumb } = props;
  useEffect(() => {
    document.title = `${title} · RayQueue`;
  }, [title]);
  return (
    <>
      <header class="page-head">
        <h1>
          {crumb && (
            <>
              <a href={crumb[1]}>{crumb[0]}</a>
              <span class="slash" aria-hidden="true">
                /
              </span>
            </>
          )}
          {title}
        </h1>
        <div class="actions">{props.actions}</div>
      </header>
      {props.children}
    </>
  );
}

export function Card(props: {
  title?: string;
  aside?: ComponentChildren;
  flush?: boolean;
  children: ComponentChildren;
}) {
  const id = useId();
  return (
    <section class={props.flush ? "card flush" : "card"} aria-labelledby={props.title ? id : undefined}>
      {props.title && (
        <header>
          <h2 id={id}>{props.title}</h2>
          <div class="aside">{props.aside}</div>
        </header>
      )}
      {props.children}
    </section>
  );
}

export function Tile(props: { label: string; value: string; note?: string; tone?: Severity | "good" }) {
  return (
    <div class="tile" data-tone={props.tone}>
      <div class="label">{props.label}</div>
      <div class="value">{props.value}</div>
      <div class="note">{props.note ?? "\u00a0"}</div>
    </div>
  );
}

export function Badge({ tone, children }: { tone?: Severity | "good" | undefined; children: ComponentChildren }) {
  return (
    <span class="badge" data-tone={tone}>
      {children}
    </span>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <p class="title">{title}</p>
      {children && <p>{children}</p>}
    </div>
  );
}

/** Rows of the height that the data will have, so that nothing jumps. */
export function Loading({ rows = 4 }: { rows?: number }) {
  return (
    <div class="loading" role="status" aria-label="Loading">
      {Array.from({ length: rows }, (_, i) => (
        <div key={i} />
      ))}
    </div>
  );
}

export function Failure({ error }: { error: unknown }) {
  const known = error instanceof ApiError;
  return (
    <div class="failure" role="alert">
      <p class="title">{known ? error.title : "This page has failed"}</p>
      <p>{known ? error.detail : String(error)}</p>
      {known && error.status === 403 && <p>Another key may have this grant: “Key” in the corner changes it.</p>}
      {known && error.status > 0 && <p class="soft">{error.code}</p>}
    </div>
  );
}

export function Field(props: { label: string; hint?: string; children: ComponentChildren; wide?: boolean }) {
  return (
    <label class={props.wide ? "field wide" : "field"}>
      <span>{props.label}</span>
      {props.children}
      {props.hint && <small>{props.hint}</small>}
    </label>
  );
}

/** A modal dialog: the browser keeps the focus in it, Escape closes it. */
export function Dialog(props: { title: string; onClose: () => void; children: ComponentChildren; wide?: boolean }) {
  const box = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const dialog = box.current;
    dialog?.showModal();
    return () => dialog?.close();
  }, []);
  return (
    <dialog
      ref={box}
      class={props.wide ? "wide" : undefined}
      aria-label={props.title}
      onCancel={(event) => {
        event.preventDefault();
        props.onClose();
      }}
    >
      <header>
        <h2>{props.title}</h2>
        <button type="button" class="quiet" aria-label="Close" onClick={props.onClose}>
          ✕
        </button>
      </header>
      {props.children}
    </dialog>
  );
}

/** Something that is sent: busy while it is, and what came of it. */
export function useAction<A extends unknown[]>(act: (...given: A) => Promise<void>) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState<unknown>(null);
  async function run(...given: A): Promise<void> {
    setBusy(true);
    setError(null);
    try {
      await act(...given);
    } catch (problem) {
      setError(problem);
    } finally {
      setBusy(false);
    }
  }
  return { busy, error, run, clear: () => setError(null) };
}

/** What a request answers; asked again every `again_ms`, and when `url` changes. The old answer stays until then. */
export function useAsked<T>(ask: (abort: AbortSignal) => Promise<T>, key: string, again_ms?: number) {
  const [state, setState] = useState<{ key: string; data?: T; error?: unknown }>({ key });
  const asking = useRef(ask);
  useEffect(() => {
    asking.current = ask;
  });
  const [turn, setTurn] = useState(0);
  useEffect(() => {
    const abort = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    async function round(): Promise<void> {
      if (!document.hidden) {
        try {
          const data = await asking.current(abort.signal);
          if (!abort.signal.aborted) setState({ key, data });
        } catch (error) {
          if (abort.signal.aborted) return;
          setState((before) =>
            before.key === key && before.data !== undefined ? { ...before, error } : { key, error },
          );
        }
      }
      if (again_ms !== undefined && !abort.signal.aborted) timer = setTimeout(() => void round(), again_ms);
    }
    void round();
    return () => {
      abort.abort();
      clearTimeout(timer);
    };
  }, [key, again_ms, turn]);
  const current = state.key === key ? state : { key };
  return { data: current.data as T | undefined, error: current.error, again: () => setTurn((before) => before + 1) };
}
