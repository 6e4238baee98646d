// Where the reader is. The address's hash holds page, run, zoom and selection, so that a link shows the same thing.
import { computed, signal } from "@preact/signals";

export interface Route {
  page: string;
  params: Record<string, string>;
}

function parse(hash: string): Route {
  const [page, query] = hash.replace(/^#\/?/, "").split("?");
  return { page: page || "", params: Object.fromEntries(new URLSearchParams(query ?? "")) };
}

function write({ page, params }: Route): string {
  const query = new URLSearchParams(Object.entries(params).filter(([, v]) => v !== "")).toString();
  return `#/${page}${query ? `?${query}` : ""}`;
}

export const route = signal<Route>(parse(location.hash));
addEventListener("hashchange", () => (route.value = parse(location.hash)));

/** What belongs to the view of a run and stays when the page changes. */
const KEPT = ["run", "runs", "axis", "zoom", "smooth", "token"];

export function href(page: string, params: Record<string, string> = {}): string {
  const kept = Object.fromEntries(Object.entries(route.value.params).filter(([k]) => KEPT.includes(k)));
  return write({ page, params: { ...kept, ...params } });
}

export function go(page: string, params: Record<string, string> = {}): void {
  location.hash = href(page, params);
}

/** Changes parameters of this page in place: no entry in the history for every keystroke. */
export function set(params: Record<string, string | null>): void {
  const next = { ...route.value.params };
  for (const [k, v] of Object.entries(params)) {
    if (v === null || v === "") delete next[k];
    else next[k] = v;
  }
  route.value = { page: route.value.page, params: next };
  history.replaceState(null, "", write(route.value));
}

export const param = (name: string): string | null => route.value.params[name] ?? null;

export type Axis = "step" | "tokens" | "time" | "samples";
export const axis = computed<Axis>(() => (route.value.params.axis as Axis) || "step");

export const zoom = computed<[number, number] | null>(() => {
  const [low, high] = (route.value.params.zoom ?? "").split(",").map(Number);
  return Number.isFinite(low) && Number.isFinite(high) && high > low ? [low, high] : null;
});

export function zoomTo(range: [number, number] | null): void {
  set({ zoom: range ? range.map((v) => String(Number(v.toPrecision(7)))).join(",") : null });
}
