import { render } from "preact";

import { App } from "./app";
import { watch } from "./live";
import "./style.css";

const root = document.getElementById("app");
if (root) {
  render(<App />, root);
  void watch(new AbortController().signal);
}
