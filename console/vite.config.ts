import { createHash } from "node:crypto";
import { readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join, relative, sep } from "node:path";

import { defineConfig, type Plugin } from "vite";

import { fixtures } from "./fixtures/server.ts";

const here = import.meta.dirname;
const built = join(here, "../rayqueue/gateway/console");

/** The gateway that `npm run dev` asks; `npm run fixtures` asks none, but a cluster that is made up. */
const gateway = process.env["GATEWAY"] ?? "http://127.0.0.1:8280";

/** Writes beside the page which sources it was built from: tests/unit/gateway/test_console.py compares. */
function sources(): Plugin {
  const digest = (data: string | Buffer): string => createHash("sha256").update(data).digest("hex");
  return {
    name: "rayqueue-sources",
    apply: "build",
    closeBundle() {
      const single = ["index.html", "package-lock.json", "package.json", "tsconfig.json", "vite.config.ts"];
      const folders = ["public", "src"].flatMap((folder) =>
        readdirSync(join(here, folder), { recursive: true, withFileTypes: true })
          .filter((each) => each.isFile())
          .map((each) => relative(here, join(each.parentPath, each.name)).split(sep).join("/")),
      );
      const lines = [...single, ...folders].sort().map((name) => `${name} ${digest(readFileSync(join(here, name)))}\n`);
      writeFileSync(join(built, "sources.sha256"), `${digest(lines.join(""))}\n`);
    },
  };
}

/** What is in the page and is not ours, with its licence, as that asks for. */
function licences(): Plugin {
  return {
    name: "rayqueue-licences",
    apply: "build",
    generateBundle(_, bundle) {
      const modules = Object.values(bundle).flatMap((each) => (each.type === "chunk" ? Object.keys(each.modules) : []));
      const found = modules.flatMap((each) => /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(each)?.[1] ?? []);
      const source = [...new Set(found)]
        .sort()
        .map((name) => `${name}\n\n${readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim()}\n`)
        .join("\n----\n\n");
      this.emitFile({ type: "asset", fileName: "licences.txt", source });
    },
  };
}

export default defineConfig(({ mode }) => ({
  base: "./",
  plugins: mode === "fixtures" ? [fixtures()] : [licences(), sources()],
  build: {
    outDir: built,
    emptyOutDir: true,
    target: "es2022",
    assetsInlineLimit: 0, // the page's policy allows nothing inline
    modulePreload: { polyfill: false },
    reportCompressedSize: false,
  },
  server: { host: "127.0.0.1", proxy: mode === "fixtures" ? {} : { "/v1": gateway, "/readyz": gateway } },
  test: { environment: "happy-dom", include: ["tests/**/*.test.{ts,tsx}"] },
}));
