/** A real gateway, on a queue in memory, in a process of its own (gateway.py). */

import { type ChildProcess, spawn } from "node:child_process";
import { createInterface, type Interface } from "node:readline";
import { fileURLToPath } from "node:url";

const here = fileURLToPath(new URL(".", import.meta.url));
const python = process.env["PYTHON"] ?? `${here}../../../.venv/bin/python`;

export class Gateway {
  url = "";
  restUrl = "";
  readonly #lines: AsyncIterator<string>;

  private constructor(
    private readonly child: ChildProcess,
    lines: Interface,
  ) {
    this.#lines = lines[Symbol.asyncIterator]();
  }

  static async start(): Promise<Gateway> {
    const child = spawn(python, [`${here}gateway.py`], { stdio: ["pipe", "pipe", "inherit"] });
    if (!child.stdout) throw new Error("no output");
    const gateway = new Gateway(child, createInterface({ input: child.stdout }));
    const ports = await gateway.#answer();
    gateway.url = `http://127.0.0.1:${ports["grpc_port"]}`;
    gateway.restUrl = `http://127.0.0.1:${ports["rest_port"]}`;
    return gateway;
  }

  async #answer(): Promise<Record<string, unknown>> {
    const line = await this.#lines.next();
    if (line.done) throw new Error("the gateway did not start; its error is above");
    return JSON.parse(line.value) as Record<string, unknown>;
  }

  async tell(command: string): Promise<Record<string, unknown>> {
    this.child.stdin?.write(`${command}\n`);
    return await this.#answer();
  }

  async stop(): Promise<void> {
    const ended = new Promise((resolve) => this.child.once("exit", resolve));
    this.child.stdin?.end();
    const timer = setTimeout(() => this.child.kill("SIGKILL"), 15_000);
    await ended;
    clearTimeout(timer);
  }
}
