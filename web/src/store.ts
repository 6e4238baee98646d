// What is open now. Pages read signals; nothing else changes them.
import { batch, computed, effect, signal, type Signal } from "@preact/signals";
import type { Chart, Run, RunHead } from "./data";
import { param, route, set, type Axis } from "./route";
import type { Source } from "./load";
import { cumulative } from "./math";
import type { Table, Values } from "./table";

export interface Opened {
  run: Signal<Run>;
  table: Table;
  /** Grows with every row that arrives, so that charts know when to draw again. */
  tick: Signal<number>;
}

export const source = signal<Source | null>(null);
export const heads = signal<RunHead[]>([]);
export const failure = signal<string | null>(null);
export const connected = signal(true);
const opened = signal<Map<string, Opened>>(new Map());
const opening = new Set<string>();

export const live = computed(() => source.value?.mode === "serve");
export const catalogue = computed<Chart[]>(() => [...(source.value?.catalogue ?? [])].sort((a, b) => (a.order ?? 0) - (b.order ?? 0)));

/** At most eight runs are laid over each other: more colours cannot be told apart. */
export const MOST_RUNS = 8;

export const chosen = computed<string[]>(() => {
  const several = param("runs")?.split(",").filter(Boolean);
  if (several?.length) return several.slice(0, MOST_RUNS);
  return live.value ? [] : heads.value.slice(0, MOST_RUNS).map((head) => head.id);
});

export const runId = computed<string | null>(() => param("run") ?? (live.value ? null : (heads.value[0]?.id ?? null)));
export const current = computed<Opened | null>(() => (runId.value ? (opened.value.get(runId.value) ?? null) : null));
export const compared = computed<Opened[]>(() => chosen.value.map((id) => opened.value.get(id)).filter((o): o is Opened => !!o));

export const page = computed<string>(() => {
  const named = route.value.page;
  if (named) return named;
  if (live.value) return runId.value ? "overview" : "runs";
  return heads.value.length > 1 && !param("run") ? "compare" : "overview";
});

async function open(id: string): Promise<void> {
  if (opened.value.has(id) || opening.has(id)) return;
  opening.add(id);
  try {
    const { run, table } = await source.value!.open(id);
    opened.value = new Map(opened.value).set(id, { run: signal(run), table, tick: signal(0) });
  } catch (error) {
    failure.value = String(error instanceof Error ? error.message : error);
  } finally {
    opening.delete(id);
  }
}

/** Opens what the address asks for, and follows the run that is shown. */
export function watchAddress(): void {
  effect(() => {
    if (!source.value) return;
    if (runId.value) void open(runId.value);
    if (page.value === "compare") for (const id of chosen.value) void open(id);
  });
  let followed: string | null = null;
  let stop = (): void => {};
  effect(() => {
    const id = current.value ? runId.value : null;
    if (id === followed || !source.value?.follow) return;
    stop();
    followed = id;
    stop = id ? follow(id) : () => {};
  });
}

const REFRESH_MS = 3000; // the verdict is judged again at most this often while rows arrive

function follow(id: string): () => void {
  let timer = 0;
  const refresh = async (whole: boolean): Promise<void> => {
    timer = 0;
    const known = opened.value.get(id);
    if (!known || whole) {
      const { run, table } = await source.value!.open(id);
      opened.value = new Map(opened.value).set(id, { run: signal(run), table, tick: signal(0) });
      return;
    }
    const run = await source.value!.judge!(id);
    known.run.value = { ...run, state: known.run.value.state.kind === "running" && run.state.kind === "running" ? known.run.value.state : run.state };
  };
  const later = (): void => {
    timer ||= window.setTimeout(() => void refresh(false).catch(() => {}), REFRESH_MS);
  };
  const end = source.value!.follow!(id, {
    rows: (rows) => {
      const known = opened.value.get(id);
      if (!known || !rows.length) return;
      known.table.append(rows);
      batch(() => {
        known.tick.value++;
        const step = known.table.steps.at(-1) ?? null;
        const tokens = known.table.last("run/tokens_total") ?? known.run.value.facts.tokens;
        known.run.value = { ...known.run.value, facts: { ...known.run.value.facts, step, tokens } };
      });
      later();
    },
    now: (state) => {
      const known = opened.value.get(id);
      if (known) known.run.value = { ...known.run.value, state: { ...known.run.value.state, ...state } };
      if (state?.kind && state.kind !== "running") later();
    },
    event: (event) => {
      const known = opened.value.get(id);
      if (known) known.run.value = { ...known.run.value, events: [...known.run.value.events, event] };
    },
    restart: () => void refresh(true),
    connection: (up) => (connected.value = up),
  });
  return () => {
    clearTimeout(timer);
    end();
  };
}

/** The x values of a run's rows on the axis that the reader chose; null where a run did not record what the axis needs. */
export function xOf(table: Table, axis: Axis): Values | null {
  if (axis === "tokens") return table.get("run/tokens_total") ?? (table.get("rollout/tokens") ? cumulative(table.get("rollout/tokens")!) : null);
  if (axis === "samples") return table.get("run/samples") ? cumulative(table.get("run/samples")!) : null;
  if (axis === "time") return hours(table);
  return table.steps;
}

/** Hours of work: gaps between two starts are not counted where the steps' own times are known. */
function hours(table: Table): Values | null {
  const total = table.get("time/total");
  if (total) return cumulative(total).map((s) => (s ?? 0) / 3600);
  const at = table.get("time/at");
  const first = at?.find((v) => v !== null);
  return at && first != null ? at.map((v) => (v === null ? null : (v - first) / 3600)) : null;
}

export function chooseRuns(ids: string[]): void {
  set({ runs: ids.slice(0, MOST_RUNS).join(",") || null });
}
