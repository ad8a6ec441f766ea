import { describe, expect, it } from "vitest";

import { avro } from "../src/avro";
import type { RecordOut } from "../src/types";
import { filter, hex, indent, preview, show } from "../src/values";

const place = { topic: "orders", partition: 0, offset: 0, lane: 0, timestamp_ms: 0 };
const json = (value: string, more: Partial<RecordOut> = {}): RecordOut => ({ ...place, text: value, ...more });

describe("show", () => {
  it("keeps the digits of numbers that JavaScript cannot hold", () => {
    expect(show({ text: '{"id":12345678901234567890,"x":1.10}' }, "auto").text).toBe(
      '{\n  "id": 12345678901234567890,\n  "x": 1.10\n}',
    );
  });

  it("shows bytes as hex, and says so if text was asked for", () => {
    const shown = show({ base64: "AAH/QQ==" }, "text");
    expect(shown.form).toBe("hex");
    expect(shown.text).toContain("00 01 ff 41");
    expect(shown.text).toContain("···A");
    expect(shown.problem).toContain("UTF-8");
  });

  it("tells a record without a value from an empty one", () => {
    expect(show({}, "auto").form).toBe("none");
    expect(show({ text: "" }, "auto").form).toBe("text");
  });
});

describe("indent", () => {
  it("changes nothing but spaces", () => {
    for (const text of ['{"a":[],"b":{},"c":[1,[2,{"d":"x, {y}: \\"z\\""}]]}', "[]", '"a"', "-1.5e3", '{"":null}']) {
      expect(JSON.parse(indent(text))).toEqual(JSON.parse(text));
    }
    expect(indent('{"a":[],"b":[1]}')).toBe('{\n  "a": [],\n  "b": [\n    1\n  ]\n}');
  });
});

describe("hex", () => {
  it("is bounded", () => {
    expect(hex(new Uint8Array(100), 32).split("\n")).toHaveLength(3);
    expect(hex(new Uint8Array(100), 32)).toContain("68 bytes more");
    expect(preview({ base64: btoa("\0".repeat(64)) })).toMatch(/…$/);
  });
});

describe("filter", () => {
  it("finds text in key, value and headers", () => {
    expect(filter("PAID")(json('{"state":"paid"}'))).toBe(true);
    expect(filter("cust")(json("{}", { key: "customer-4" }))).toBe(true);
    expect(filter("a1b2")(json("{}", { headers: { trace: "a1b2" } }))).toBe(true);
    expect(filter("nothing")(json("{}"))).toBe(false);
  });

  it("compares fields of JSON, as numbers if both are", () => {
    const record = json('{"order":{"total":9.5,"tags":["new"]},"n":10}');
    expect(filter("order.total < 10")(record)).toBe(true);
    expect(filter("n > 9")(record)).toBe(true);
    expect(filter("order.tags[0] = new")(record)).toBe(true);
    expect(filter("order.missing = x")(record)).toBe(false);
    expect(filter("constructor = x")(record)).toBe(false);
    expect(filter("n >= 1")(json("not json"))).toBe(false);
  });
});

describe("avro", () => {
  const schema = JSON.stringify({
    type: "record",
    name: "Order",
    namespace: "shop",
    fields: [
      { name: "id", type: "long" },
      { name: "note", type: ["null", "string"] },
      {
        name: "lines",
        type: { type: "array", items: { type: "record", name: "Line", fields: [{ name: "n", type: "int" }] } },
      },
      { name: "more", type: { type: "map", values: "Line" } },
      { name: "price", type: "double" },
    ],
  });
  // Made by fastavro.schemaless_writer of {"id": -3, "note": "hi", "lines": [{"n": 1}, {"n": 300}], "more": {"k": {"n": 2}}, "price": 1.5}
  const bytes = Uint8Array.from([5, 2, 4, 104, 105, 4, 2, 216, 4, 0, 2, 2, 107, 4, 0, 0, 0, 0, 0, 0, 0, 248, 63]);

  it("reads what Python writes", () => {
    expect(JSON.parse(avro(schema, bytes))).toEqual({
      id: -3,
      note: "hi",
      lines: [{ n: 1 }, { n: 300 }],
      more: { k: { n: 2 } },
      price: 1.5,
    });
  });

  it("refuses what is cut, too long, or of another schema", () => {
    for (let cut = 0; cut < bytes.length; cut += 1) expect(() => avro(schema, bytes.slice(0, cut))).toThrow();
    expect(() => avro(schema, Uint8Array.from([...bytes, 0]))).toThrow("left over");
    expect(() =>
      avro('{"type":"array","items":"null"}', Uint8Array.from([254, 255, 255, 255, 255, 255, 255, 255, 255, 1])),
    ).toThrow();
    expect(() => avro('"nonsense"', bytes)).toThrow("unknown type");
  });

  it("ends for a schema that names itself", () => {
    const loop = '{"type":"record","name":"A","fields":[{"name":"a","type":"A"}]}';
    expect(() => avro(loop, bytes)).toThrow("deep");
  });
});
