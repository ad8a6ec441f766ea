/** Light, dark, or what the system says. A choice is remembered; it is no secret. */

import { computed, signal } from "@preact/signals";

export type Choice = "system" | "light" | "dark";

const NAME = "rayqueue.theme";
const dark = matchMedia("(prefers-color-scheme: dark)");
const system = signal(dark.matches);
dark.addEventListener("change", () => (system.value = dark.matches));

function remembered(): Choice {
  try {
    const found = localStorage.getItem(NAME);
    return found === "light" || found === "dark" ? found : "system";
  } catch {
    return "system";
  }
}

export const choice = signal<Choice>(remembered());
export const theme = computed(() => (choice.value === "system" ? (system.value ? "dark" : "light") : choice.value));
theme.subscribe((value) => (document.documentElement.dataset["theme"] = value));

export function nextTheme(): void {
  const order: Choice[] = ["system", "light", "dark"];
  choice.value = order[(order.indexOf(choice.value) + 1) % order.length] as Choice;
  try {
    localStorage.setItem(NAME, choice.value);
  } catch {
    // forbidden here: the choice lives as long as the page
  }
}
