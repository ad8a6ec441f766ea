import { render } from "preact";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import { World } from "../fixtures/world";
import { setKey } from "../src/api";
import { took } from "../src/live";
import { GroupsPage } from "../src/pages/groups";
import { OverviewPage } from "../src/pages/overview";
import { QueuePage, QueuesPage } from "../src/pages/queues";
import { TopicsPage } from "../src/pages/topics";

let world: World;
let now = 1_763_460_000_000;
let missing = false;
let root: HTMLElement;

beforeEach(() => {
  world = new World(() => now);
  missing = false;
  root = document.createElement("div");
  document.body.append(root);
  vi.stubGlobal("fetch", (url: string, options: RequestInit) => {
    const [status, body] =
      missing && url.startsWith("/v1/queues")
        ? [404, { code: "unknown_route", title: "There is no such route", detail: "" }]
        : world.answer(options.method ?? "GET", url, options.body ? JSON.parse(String(options.body)) : null);
    return Promise.resolve(new Response(JSON.stringify(body), { status }));
  });
});

afterEach(() => {
  render(null, root);
  root.remove();
  setKey("");
  vi.unstubAllGlobals();
});

const text = (): string => root.textContent ?? "";

async function seen(wanted: string): Promise<void> {
  await vi.waitFor(() => expect(text()).toContain(wanted), { timeout: 5000 });
}

function button(name: string): HTMLButtonElement {
  const found = [...root.querySelectorAll("button")].find((each) => each.textContent?.trim() === name);
  if (!found) throw new Error(`no button ${name} in: ${text()}`);
  return found;
}

describe("queues", () => {
  it("send one dead letter back to work, and leave the others", async () => {
    render(<QueuePage name="thumbnails" />, root);
    await seen("0-1201");
    expect(text()).toContain("OSError: the disk is read-only");
    root.querySelector<HTMLInputElement>("[aria-label='Choose 0-1201']")?.click();
    await seen("Redrive 1 job");
    button("Redrive 1 job").click();
    await seen("1 job sent back to work.");
    expect(world.dead.map((each) => each.job_id)).toEqual(["0-1200", "0-1202"]);
    await vi.waitFor(() => expect(text()).not.toContain("0-1201"), { timeout: 5000 });
  });

  it("throw nothing away before it was asked twice", async () => {
    render(<QueuePage name="thumbnails" />, root);
    await seen("Purge all…");
    button("Purge all…").click();
    await seen("They are gone for good.");
    expect(world.dead).toHaveLength(3);
    button("Throw away").click();
    await seen("3 jobs thrown away.");
    expect(world.dead).toEqual([]);
    await seen("No job was given up");
  });

  it("say so where the gateway has none", async () => {
    missing = true;
    render(<QueuesPage />, root);
    await seen("This gateway serves no work queues yet");
  });
});

describe("what is live", () => {
  it("shows rates of successive looks, and what is wrong once it is", async () => {
    took(world.overview());
    now += 2000;
    took(world.overview());
    render(<TopicsPage />, root);
    await seen("orders");
    expect(text()).toMatch(/mail\.outboxhealthy1170?/);
    world.away = "b2";
    now += 2000;
    took(world.overview());
    await seen("replicas out of service");
    render(<GroupsPage />, root);
    await seen("warehouse");
    render(<OverviewPage />, root);
    await seen("What is wrong, and why");
    expect(text()).toContain("Broker b2 is away");
    expect(text()).toContain("2 / 3");
  });
});
