/** Avro values without container, as `rayqueue.avro` writes them, shown as JSON. Bytes come from others: all is bounded. */

type Schema = string | Schema[] | { type: Schema; [name: string]: unknown };

const MOST_ITEMS = 100_000;
const MOST_DEPTH = 64;

export function avro(schema: string, bytes: Uint8Array): string {
  if (schema.trim() === "") throw new Error("give the schema");
  const reader = new Reader(bytes);
  const value = reader.read(JSON.parse(schema) as Schema, "", 0);
  if (!reader.done) throw new Error(`${reader.left} bytes are left over`);
  return JSON.stringify(value, (_, each: unknown) => (typeof each === "bigint" ? exact(each) : each), 2);
}

/** A long that a number cannot hold is shown as its digits in quotes. */
function exact(value: bigint): number | string {
  const number = Number(value);
  return Number.isSafeInteger(number) ? number : value.toString();
}

class Reader {
  #at = 0;
  #items = 0;
  readonly #view: DataView;
  readonly #named = new Map<string, Schema>();

  constructor(readonly bytes: Uint8Array) {
    this.#view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  get left(): number {
    return this.bytes.length - this.#at;
  }

  get done(): boolean {
    return this.left === 0;
  }

  read(schema: Schema, space: string, depth: number): unknown {
    if (depth > MOST_DEPTH) throw new Error("nested too deep");
    if ((this.#items += 1) > MOST_ITEMS) throw new Error("too many items to show");
    if (Array.isArray(schema)) return this.read(this.#branch(schema), space, depth + 1);
    const kind = typeof schema === "string" ? schema : schema.type;
    if (typeof kind !== "string") return this.read(kind, space, depth + 1);
    const details = typeof schema === "string" ? {} : (schema as Record<string, unknown>);
    switch (kind) {
      case "null":
        return null;
      case "boolean":
        return this.#take(1)[0] === 1;
      case "int":
      case "long":
        return this.#long();
      case "float":
        return this.#view.getFloat32(this.#skip(4), true);
      case "double":
        return this.#view.getFloat64(this.#skip(8), true);
      case "bytes":
        return shown(this.#take(this.#length()));
      case "string":
        return new TextDecoder("utf-8", { fatal: true }).decode(this.#take(this.#length()));
      case "fixed":
        this.#name(details, schema, space);
        return shown(this.#take(Number(details["size"])));
      case "enum":
        this.#name(details, schema, space);
        return this.#symbol(details["symbols"] as string[]);
      case "array":
        return this.#blocks(() => this.read(details["items"] as Schema, space, depth + 1));
      case "map":
        return Object.fromEntries(
          this.#blocks(
            () =>
              [this.read("string", space, depth + 1), this.read(details["values"] as Schema, space, depth + 1)] as [
                string,
                unknown,
              ],
          ),
        );
      case "record":
      case "error": {
        const inner = this.#name(details, schema, space);
        const fields = details["fields"] as { name: string; type: Schema }[];
        return Object.fromEntries(fields.map((each) => [each.name, this.read(each.type, inner, depth + 1)]));
      }
      default: {
        const named = this.#named.get(kind) ?? this.#named.get(`${space}.${kind}`);
        if (named === undefined) throw new Error(`unknown type ${kind}`);
        return this.read(named, space, depth + 1);
      }
    }
  }

  /** Remembers a named type; the namespace inside of it. */
  #name(details: Record<string, unknown>, schema: Schema, space: string): string {
    const given = String(details["name"]);
    const inner = given.includes(".") ? given.slice(0, given.lastIndexOf(".")) : String(details["namespace"] ?? space);
    this.#named.set(given.includes(".") || inner === "" ? given : `${inner}.${given}`, schema);
    return inner;
  }

  #branch(schema: Schema[]): Schema {
    const found = schema[Number(this.#long())];
    if (found === undefined) throw new Error("no such branch of a union");
    return found;
  }

  #symbol(symbols: string[]): string {
    const found = symbols[Number(this.#long())];
    if (found === undefined) throw new Error("no such symbol");
    return found;
  }

  #blocks<T>(read: () => T): T[] {
    const made: T[] = [];
    for (;;) {
      let length = Number(this.#long());
      if (length === 0) return made;
      if (length < 0) {
        length = -length;
        this.#long(); // the block's size in bytes
      }
      if (length > MOST_ITEMS) throw new Error("too many items to show");
      for (let i = 0; i < length; i += 1) made.push(read());
    }
  }

  #long(): bigint {
    let value = 0n;
    for (let shift = 0n; shift < 70n; shift += 7n) {
      const byte = this.#take(1)[0] as number;
      value |= BigInt(byte & 0x7f) << shift;
      if (byte < 0x80) return (value >> 1n) ^ -(value & 1n);
    }
    throw new Error("a number is too long");
  }

  #length(): number {
    return Number(this.#long());
  }

  #skip(length: number): number {
    if (!(length >= 0 && length <= this.left)) throw new Error("the value ends early");
    const at = this.#at;
    this.#at += length;
    return at;
  }

  #take(length: number): Uint8Array {
    const at = this.#skip(length);
    return this.bytes.subarray(at, at + length);
  }
}

/** As Avro's own JSON has bytes: a character for each. */
function shown(bytes: Uint8Array): string {
  return String.fromCharCode(...bytes.subarray(0, 4096)) + (bytes.length > 4096 ? "…" : "");
}
