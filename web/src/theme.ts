// Light or dark: what the system says, unless the reader chose. Canvases need the colours as values, so they are read from the style sheet.
import { computed, signal } from "@preact/signals";

type Choice = "auto" | "light" | "dark";
const KEY = "trimtab-theme";
const system = matchMedia("(prefers-color-scheme: dark)");

function remembered(): Choice {
  try {
    return (localStorage.getItem(KEY) as Choice) || "auto";
  } catch {
    return "auto"; // a report opened from a file may have no storage
  }
}

const systemDark = signal(system.matches);
system.addEventListener("change", () => (systemDark.value = system.matches));
export const choice = signal<Choice>(remembered());
export const printing = signal(false);
addEventListener("beforeprint", () => (printing.value = true));
addEventListener("afterprint", () => (printing.value = false));

export const theme = computed<"light" | "dark">(() => {
  if (printing.value) return "light";
  if (choice.value !== "auto") return choice.value;
  return systemDark.value ? "dark" : "light";
});

export function choose(next: Choice): void {
  choice.value = next;
  try {
    if (next === "auto") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, next);
  } catch {
    // without storage the choice lasts as long as the page
  }
}

export type Palette = Record<string, string>;
const NAMES = [
  "bg", "card", "ink", "mut", "faint", "line", "grid", "ok", "warn", "bad", "accent", "band", "bandline", "metric", "metric2", "metric3", "onbar",
  "rollout", "reward", "score", "update", "publish", "checkpoint", "eval", "idle", "heat",
  "run1", "run2", "run3", "run4", "run5", "run6", "run7", "run8",
];

export const palette = computed<Palette>(() => {
  document.documentElement.dataset.theme = theme.value;
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(NAMES.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
});

export const PHASES = ["rollout", "reward", "score", "update", "publish", "checkpoint", "eval", "idle"];

/** Phases have one colour everywhere; what is no phase has none. */
export const phaseClass = (name: string): string => {
  const known = name === "evaluation" ? "eval" : name;
  return PHASES.includes(known) ? known : "idle";
};
