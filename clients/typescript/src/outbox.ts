/** Messages on their way into a stream: put by anybody, taken by the transport as fast as it can send. */

export class Outbox<T> implements AsyncIterable<T> {
  #waiting: T[] = [];
  #ended = false;
  #wake: (() => void) | null = null;

  put(message: T): void {
    if (this.#ended) return;
    this.#waiting.push(message);
    this.#wake?.();
  }

  end(): void {
    this.#ended = true;
    this.#wake?.();
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<T> {
    for (;;) {
      const next = this.#waiting.shift();
      if (next !== undefined) yield next;
      else if (this.#ended) return;
      else await new Promise<void>((resolve) => (this.#wake = resolve));
    }
  }
}
