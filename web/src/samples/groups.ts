// A group is a prompt and its samples at one step: advantages are made within it. Pure functions from rows to what is listed.
import type { Sample } from "../data";

export interface Group {
  id: string;
  step: number;
  prompt: string;
  task: string | null;
  samples: Sample[];
  mean: number | null;
  spread: number | null;
  tokens: number | null;
}

export type Outcome = "right" | "wrong" | "cut" | "failed";

const CUT = /length|trunc|cut|limit|max/i;

export function outcome(row: Sample, top = 1): Outcome {
  if (row.failure) return "failed";
  if (row.finish && CUT.test(row.finish)) return "cut";
  if (row.right !== undefined && row.right !== null) return row.right ? "right" : "wrong";
  if (row.reward === null || row.reward === undefined) return "failed";
  return row.reward > (top <= 1 ? 0.5 : 0) ? "right" : "wrong";
}

const mean = (list: number[]): number | null => (list.length ? list.reduce((a, b) => a + b, 0) / list.length : null);

export function groupsOf(rows: Sample[], step: number): Group[] {
  const by = new Map<string, Sample[]>();
  for (const row of rows) {
    const id = String(row.prompt_id ?? row.prompt);
    if (!by.has(id)) by.set(id, []);
    by.get(id)!.push(row);
  }
  return [...by].map(([id, samples]) => {
    const rewards = samples.flatMap((s) => (s.reward === null || s.reward === undefined ? [] : [s.reward]));
    const average = samples[0].group_mean ?? mean(rewards);
    const spread = samples[0].group_std ?? (average === null ? null : Math.sqrt(mean(rewards.map((r) => (r - average) ** 2)) ?? 0));
    const tokens = mean(samples.flatMap((s) => (s.tokens ? [s.tokens] : [])));
    return { id, step, prompt: samples[0].prompt ?? "", task: samples[0].task ?? null, samples, mean: average, spread, tokens };
  });
}

export type Sort = "mean" | "best" | "spread" | "length" | "gain" | "recorded";

export function sortGroups(groups: Group[], sort: Sort, before: Map<string, number>): Group[] {
  const gain = (g: Group): number => (before.has(g.id) && g.mean !== null ? g.mean - before.get(g.id)! : -Infinity);
  const keys: Record<Sort, (g: Group) => number> = {
    mean: (g) => g.mean ?? Infinity, best: (g) => -(g.mean ?? -Infinity), spread: (g) => -(g.spread ?? 0), length: (g) => -(g.tokens ?? 0), gain: (g) => -gain(g), recorded: () => 0,
  };
  return [...groups].sort((a, b) => keys[sort](a) - keys[sort](b));
}

export interface Filter {
  kind: string; // all, mixed, cut, failed
  task: string | null;
  part: string | null; // a reward part
  above: boolean;
  bound: number;
}

export function keep(group: Group, filter: Filter): boolean {
  const of = (what: Outcome): boolean => group.samples.some((s) => outcome(s) === what);
  if (filter.kind === "mixed" && !((group.spread ?? 0) > 0)) return false;
  if (filter.kind === "cut" && !of("cut")) return false;
  if (filter.kind === "failed" && !of("failed")) return false;
  if (filter.task && group.task !== filter.task) return false;
  if (!filter.part) return true;
  return group.samples.some((s) => {
    const v = s.rewards?.[filter.part!];
    return v !== null && v !== undefined && (filter.above ? v > filter.bound : v < filter.bound);
  });
}

/** A search in prompt, completion and failure; an expression that is not one is reported, not thrown. */
export function matcher(q: string, regex: boolean): { test: (row: Sample) => boolean; error: string | null } {
  const fields = (row: Sample): string[] => [row.prompt, row.completion, row.failure, ...(row.turns ?? []).map((t) => t.content)].filter((t): t is string => typeof t === "string");
  if (!regex) {
    const low = q.toLowerCase();
    return { test: (row) => fields(row).some((t) => t.toLowerCase().includes(low)), error: null };
  }
  try {
    const expression = new RegExp(q, "iu");
    return { test: (row) => fields(row).some((t) => expression.test(t)), error: null };
  } catch (error) {
    return { test: () => false, error: error instanceof Error ? error.message : String(error) };
  }
}

export const firstLine = (text: string): string => text.trim().split(/[\r\n]/, 1)[0].slice(0, 300);
