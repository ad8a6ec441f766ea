/** The frame: navigation, state of the connection, key, theme, keys of the keyboard; and which page is shown. */

import { useEffect, useState } from "preact/hooks";

import { hasKey, keyWanted, setKey } from "./api";
import { failure, overview, problems, refresh } from "./live";
import { GroupPage } from "./pages/group";
import { GroupsPage } from "./pages/groups";
import { OverviewPage } from "./pages/overview";
import { QueuePage, QueuesPage } from "./pages/queues";
import { SettingsPage } from "./pages/settings";
import { TopicPage } from "./pages/topic";
import { TopicsPage } from "./pages/topics";
import { Dialog, Empty, Failure, Field, Loading } from "./parts/basics";
import { go, place } from "./router";
import { choice, nextTheme } from "./theme";

const SECTIONS: [letter: string, name: string, hash: string, part: string | undefined][] = [
  ["o", "Overview", "#/", undefined],
  ["t", "Topics", "#/topics", "topics"],
  ["g", "Groups", "#/groups", "groups"],
  ["q", "Queues", "#/queues", "queues"],
  ["s", "Settings", "#/settings", "settings"],
];

export function App() {
  const [help, setHelp] = useState(false);
  useEffect(() => {
    let first = "";
    function typed(event: KeyboardEvent): void {
      const target = event.target as HTMLElement;
      if (event.metaKey || event.ctrlKey || event.altKey || target.closest("input, textarea, select, dialog")) return;
      const section = first === "g" ? SECTIONS.find(([letter]) => letter === event.key) : undefined;
      first = first === "" && event.key === "g" ? "g" : "";
      if (section) go(section[2]);
      else if (event.key === "?") setHelp(true);
      else if (event.key === "/") {
        const search = document.querySelector<HTMLInputElement>("main input[type=search]");
        if (!search) return;
        search.focus();
      } else return;
      event.preventDefault();
    }
    addEventListener("keydown", typed);
    return () => removeEventListener("keydown", typed);
  }, []);
  return (
    <div class="frame">
      <a
        class="skip"
        href="#main"
        onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}
      >
        Skip to the content
      </a>
      <Navigation onHelp={() => setHelp(true)} />
      <main id="main" tabIndex={-1}>
        <Connection />
        <Content />
      </main>
      {keyWanted.value && <KeyDialog />}
      {help && <Help onClose={() => setHelp(false)} />}
    </div>
  );
}

function Navigation({ onHelp }: { onHelp: () => void }) {
  const here = place.value.parts[0];
  const wrong = problems.value.filter((each) => each.severity !== "note").length;
  const look = overview.value;
  return (
    <nav class="side" aria-label="Sections">
      <a class="brand" href="#/">
        <img src="./icon.svg" width="26" height="26" alt="" />
        <span>RayQueue</span>
      </a>
      <ul>
        {SECTIONS.map(([letter, name, hash, part]) => (
          <li key={name}>
            <a href={hash} aria-current={here === part ? "page" : undefined} title={`g then ${letter}`}>
              {name}
              {part === undefined && wrong > 0 && <span class="bubble">{wrong}</span>}
            </a>
          </li>
        ))}
      </ul>
      <div class="foot">
        <div class="soft">
          {look ? (
            <>
              <div title={look.cluster.cluster_id}>cluster {look.cluster.cluster_id.slice(0, 12)}</div>
              <div>
                gateway {look.gateway} · {look.version}
              </div>
            </>
          ) : (
            <div>&nbsp;</div>
          )}
        </div>
        <div class="buttons">
          <button type="button" class="quiet" onClick={nextTheme} aria-label={`Theme: ${choice.value}`}>
            {choice.value === "system" ? "Auto" : choice.value === "light" ? "Light" : "Dark"}
          </button>
          <button type="button" class="quiet" onClick={() => (keyWanted.value = true)}>
            {hasKey() ? "Key ✓" : "Key"}
          </button>
          <button type="button" class="quiet" onClick={onHelp} aria-label="Keyboard help">
            ?
          </button>
        </div>
      </div>
    </nav>
  );
}

/** A line that says when what is seen is not what is. */
function Connection() {
  const error = failure.value;
  if (!error || !overview.value || keyWanted.value) return null;
  return (
    <div class="stale" role="status">
      <strong>{error.title}.</strong> What you see is from before. {error.detail}
    </div>
  );
}

function Content() {
  const [section, name, tab] = place.value.parts;
  if (overview.value === null && section !== "settings") {
    if (failure.value && !keyWanted.value) return <Failure error={failure.value} />;
    return <Loading rows={8} />;
  }
  if (section === undefined) return <OverviewPage />;
  if (section === "topics")
    return name ? <TopicPage key={name} name={name} tab={tab ?? "partitions"} /> : <TopicsPage />;
  if (section === "groups") return name ? <GroupPage key={name} name={name} /> : <GroupsPage />;
  if (section === "queues") return name ? <QueuePage key={name} name={name} /> : <QueuesPage />;
  if (section === "settings") return <SettingsPage />;
  return <Empty title="There is no such page" />;
}

function KeyDialog() {
  const [typed, setTyped] = useState("");
  return (
    <Dialog title="API key" onClose={() => (keyWanted.value = false)}>
      <form
        onSubmit={(event) => {
          event.preventDefault();
          setKey(typed);
          refresh();
        }}
      >
        <p>
          This gateway asks for a key. It is kept in this tab until you close it, and is sent to this gateway only. Keys
          are made by <code>rayqueue keys create</code>.
        </p>
        <Field label="Key" wide>
          <input
            type="password"
            autocomplete="off"
            autofocus
            value={typed}
            onInput={(event) => setTyped(event.currentTarget.value)}
          />
        </Field>
        <footer>
          {hasKey() && (
            <button type="button" class="quiet" onClick={() => (setKey(""), refresh())}>
              Forget the key
            </button>
          )}
          <button type="submit" class="primary" disabled={typed.trim() === ""}>
            Use this key
          </button>
        </footer>
      </form>
    </Dialog>
  );
}

function Help({ onClose }: { onClose: () => void }) {
  return (
    <Dialog title="Keyboard" onClose={onClose}>
      <dl class="keys">
        {SECTIONS.map(([letter, name]) => (
          <div key={name}>
            <dt>
              <kbd>g</kbd> <kbd>{letter}</kbd>
            </dt>
            <dd>{name}</dd>
          </div>
        ))}
        <div>
          <dt>
            <kbd>/</kbd>
          </dt>
          <dd>Filter what is listed</dd>
        </div>
        <div>
          <dt>
            <kbd>Esc</kbd>
          </dt>
          <dd>Close a dialog</dd>
        </div>
        <div>
          <dt>
            <kbd>?</kbd>
          </dt>
          <dd>This help</dd>
        </div>
      </dl>
    </Dialog>
  );
}
