// From a chart of the catalogue and a run to what is drawn: lines, bands and marks. The drawing, the table, CSV and SVG all come from this.
import type { Chart, Run } from "../data";
import { visible } from "../format";
import { countPresent, smooth } from "../math";
import type { Axis } from "../route";
import { xOf } from "../store";
import type { Table, Values } from "../table";

export interface Line {
  metric: string;
  label: string;
  x: Values;
  y: Values;
  colour: string; // a name of the palette
  width: number;
  dash?: number[];
  faint?: boolean; // the raw values behind a smoothed line
  dots?: boolean;
  joined?: boolean; // drawn across missing rows: evaluations are rare by design
  error?: Values; // half the height of a whisker
}

export interface Area {
  from: number;
  to: number;
  low: number | null;
  high: number | null;
}

export interface Mark {
  x: number;
  kind: "start" | "bad" | "best";
  text: string;
}

export interface Stack {
  x: Values;
  parts: { name: string; colour: string; y: Values }[];
  share: boolean;
}

export interface Heat {
  x: number[];
  edges: number[];
  counts: number[][];
}

export interface Model {
  id: string;
  title: string;
  unit: string | null;
  note: string | null;
  axis: Axis;
  log: boolean;
  zero: boolean;
  lines: Line[];
  bands: Area[];
  bandText: string | null;
  marks: Mark[];
  stack: Stack | null;
  heat: Heat | null;
  spread: { x: number[]; low: number[]; high: number[]; colour: string; text: string } | null;
}

export type Smoothing = number | "auto";
const NEUTRALS = ["metric", "metric2", "metric3"];
const DASHES: (number[] | undefined)[] = [undefined, [5, 3], [1.5, 3], [8, 3, 2, 3]];
/** Below this a line is no evidence: the values are shown as points, and nothing is smoothed. */
export const FEWEST_TO_JUDGE = 5;

/** The window in rows: what the rules smooth with, or the reader's choice. */
export function windowOf(run: Run, metric: string, rows: number, smoothing: Smoothing): number {
  if (rows < FEWEST_TO_JUDGE) return 1;
  if (smoothing !== "auto") return smoothing;
  return run.smoothing[metric] ?? 1;
}

/** Whether a line of the catalogue shows a metric. A star in a prefix stands for one part of a name: `reward/*\/wait_s`. */
function shows(m: Chart["metrics"][number], name: string): boolean {
  const prefix = m.prefix ?? "";
  if (prefix.includes("*")) {
    const [wanted, parts] = [prefix.split("/"), name.split("/")];
    return wanted.length === parts.length && wanted.every((w, k) => w === "*" || w === parts[k]);
  }
  return name.startsWith(prefix) && !name.slice(prefix.length).includes("/") && !m.without?.includes(name);
}

function labelOf(m: Chart["metrics"][number], name: string): string {
  const star = (m.prefix ?? "").split("/").indexOf("*");
  const rest = star < 0 ? name.slice(m.prefix!.length) : name.split("/").slice(star).filter((part) => part !== "mean").join(" ");
  return visible(rest.replaceAll("_", " "));
}

export function metricsOf(chart: Chart, table: Table): { name: string; label: string; style: string }[] {
  return chart.metrics.flatMap((m) => {
    if (m.name) return table.has(m.name) ? [{ name: m.name, label: m.label || chart.title, style: m.style ?? "line" }] : [];
    return table.names().filter((name) => shows(m, name)).map((name) => ({ name, label: labelOf(m, name), style: m.style ?? "line" }));
  });
}

function linesOf(run: Run, table: Table, spec: { name: string; label: string; style: string }, x: Values, smoothing: Smoothing, thinToo: boolean): Line[] {
  const y = table.get(spec.name);
  if (!y) return [];
  const rows = countPresent(y);
  if (!rows) return [];
  const { name: metric, label } = spec;
  const evaluation = metric.startsWith("eval/");
  const rare = rows < table.steps.length / 2 || rows < FEWEST_TO_JUDGE;
  const base = { metric, label, x };
  if (evaluation && (spec.style === "dots" || rare)) {
    const deviation = metric === "eval/pass@1" || metric === "eval/score" ? table.get("eval/stderr") : null;
    const error = deviation?.map((v) => (v === null ? null : 1.96 * v));
    return [{ ...base, y, colour: "eval", width: 1.4, dash: [1, 4], dots: true, joined: true, error }];
  }
  if (spec.style === "smooth" && rare && !thinToo) return []; // too few to smooth: the raw values stand for themselves
  if (spec.style === "dashed") return [{ ...base, y, colour: "mut", width: 1.4, dash: [4, 3], joined: true }];
  if (spec.style === "dots" || rare) return [{ ...base, y, colour: "metric", width: 1.2, dots: true, joined: true }];
  const window = windowOf(run, metric, rows, smoothing);
  if (spec.style === "thin") return [{ ...base, y, colour: "metric", width: 1, faint: true }];
  if (window < 2) return [{ ...base, y, colour: "metric", width: 1.6 }];
  const smoothed: Line = { ...base, y: smooth(y, window), colour: "metric", width: 2.2 };
  return thinToo ? [{ ...base, y, colour: "metric", width: 1, faint: true }, smoothed] : [smoothed];
}

/** Lines of one run are neutral; a second and third are told apart by shade and dashes, never by a colour that means something else. */
function tellApart(lines: Line[]): void {
  let nth = 0;
  for (const line of lines) {
    if (line.colour !== "metric" || line.faint) continue;
    line.colour = NEUTRALS[nth % NEUTRALS.length];
    line.dash = DASHES[Math.floor(nth / NEUTRALS.length) % DASHES.length] ?? line.dash;
    const raw = lines.find((other) => other.faint && other.metric === line.metric);
    if (raw) raw.colour = line.colour;
    nth++;
  }
}

function stepToX(table: Table, x: Values): (step: number) => number | null {
  const at = new Map(table.steps.map((step, i) => [step, x[i]]));
  return (step) => {
    if (at.has(step)) return at.get(step)!;
    const i = table.steps.findIndex((s) => s >= step);
    return i < 0 ? (x.at(-1) ?? null) : x[i];
  };
}

export function build(chart: Chart, run: Run, table: Table, axis: Axis, smoothing: Smoothing): Model | null {
  const x = xOf(table, axis);
  if (!x) return null;
  const model = empty(chart, axis);
  const place = stepToX(table, x);
  const specs = metricsOf(chart, table);
  if (chart.kind === "stack") model.stack = stackOf(chart, run, table, x, place);
  else {
    const thinNamed = new Set(chart.metrics.filter((m) => m.style === "thin").map((m) => m.name));
    model.lines = specs.flatMap((spec) => linesOf(run, table, spec, x, smoothing, !thinNamed.has(spec.name)));
    tellApart(model.lines);
  }
  if (run.limit_tokens && model.lines.length && specs.some((spec) => spec.name.startsWith("response/length"))) {
    model.lines.push({ metric: "learn.max_new_tokens", label: "limit", x, y: (table.get("response/length_mean") ?? x).map((v) => (v === null ? null : run.limit_tokens!)), colour: "mut", width: 1.2, dash: [4, 3], joined: true });
  }
  if (chart.kind === "heat") model.heat = heatOf(chart, run, place);
  if (!model.lines.length && !model.stack && !model.heat) return null;
  const banded = specs.map((spec) => run.bands[spec.name]).find(Boolean);
  if (banded && !model.stack && !model.heat) {
    model.bandText = banded.text;
    model.bands = banded.spans.map((span) => ({ ...span, from: place(span.from) ?? span.from, to: place(span.to) ?? span.to }));
  }
  marksOf(model, run, specs.map((spec) => spec.name), place);
  return model;
}

export function empty(chart: Chart, axis: Axis): Model {
  return {
    id: chart.id, title: visible(chart.title), unit: chart.unit ?? null, note: chart.note ?? null, axis, log: !!chart.log, zero: !!chart.zero,
    lines: [], bands: [], bandText: null, marks: [], stack: null, heat: null, spread: null,
  };
}

function marksOf(model: Model, run: Run, metrics: string[], place: (step: number) => number | null): void {
  for (const step of run.starts) {
    const at = place(step);
    if (at !== null) model.marks.push({ x: at, kind: "start", text: `resumed at step ${step}` });
  }
  for (const metric of metrics) {
    for (const step of run.not_finite[metric] ?? []) {
      const at = place(step);
      if (at !== null) model.marks.push({ x: at, kind: "bad", text: `${metric} is not finite at step ${step}` });
    }
  }
}

const NOT_PHASES = new Set(["time/total", "time/at", "time/communication", "time/observe"]);

function stackOf(chart: Chart, run: Run, table: Table, x: Values, place: (step: number) => number | null): Stack | null {
  const groups = run.distributions?.groups;
  if (/group/.test(chart.id) && groups?.length) {
    const shares = groups.map((counts) => {
      const all = counts.reduce((a, b) => a + b, 0) || 1;
      return [(counts[0] ?? 0) / all, counts.slice(1, -1).reduce((a, b) => a + b, 0) / all, counts.length > 1 ? counts.at(-1)! / all : 0];
    });
    const names = ["all wrong", "mixed", "all right"];
    const colours = ["metric3", "metric2", "metric"];
    return { x: run.distributions!.steps.map(place), parts: names.map((name, k) => ({ name, colour: colours[k], y: shares.map((s) => s[k]) })), share: true };
  }
  const specs = metricsOf(chart, table).filter((spec) => !NOT_PHASES.has(spec.name));
  if (!specs.length) return null;
  const order = ["rollout", "reward", "score", "update", "publish", "checkpoint", "eval", "idle"];
  const phase = (name: string): string => name.split("/").at(-1)!;
  const timed = specs.every((spec) => spec.name.startsWith("time/"));
  if (timed) specs.sort((a, b) => (order.indexOf(phase(a.name)) + 99) % 99 - ((order.indexOf(phase(b.name)) + 99) % 99));
  const parts = specs.map((spec, k) => ({
    name: timed ? phase(spec.name) : spec.label,
    colour: timed ? (order.includes(phase(spec.name)) ? phase(spec.name) : "idle") : NEUTRALS[k % 3],
    y: table.get(spec.name)!,
  }));
  return { x, parts, share: false };
}

function heatOf(chart: Chart, run: Run, place: (step: number) => number | null): Heat | null {
  const d = run.distributions;
  const histogram = /reward/.test(chart.id) ? d?.rewards : /advantage/.test(chart.id) ? d?.advantages : d?.lengths;
  if (!d || !histogram?.counts?.length) return null;
  const x = d.steps.map(place);
  if (x.some((v) => v === null)) return null;
  return { x: x as number[], edges: histogram.edges, counts: histogram.counts };
}

/** Runs that differ in the seed alone: their mean as one line and the area between the lowest and the highest. */
function seedBand(model: Model, ids: string[], text: string): void {
  const lines = model.lines.filter((line) => !line.faint && ids.some((id) => line.metric.startsWith(`${id} `)));
  const metric = lines[0]?.metric.split(" ").slice(1).join(" ");
  const same = lines.filter((line) => line.metric.endsWith(` ${metric}`));
  if (same.length < 2) return;
  const at = new Map<number, number[]>();
  for (const line of same) line.x.forEach((v, i) => v !== null && line.y[i] !== null && at.set(v, [...(at.get(v) ?? []), line.y[i]!]));
  const rows = [...at].filter(([, list]) => list.length === same.length).sort((a, b) => a[0] - b[0]);
  if (rows.length < 2) return;
  model.spread = { x: rows.map(([v]) => v), low: rows.map(([, l]) => Math.min(...l)), high: rows.map(([, l]) => Math.max(...l)), colour: same[0].colour, text };
}

/** The same chart of several runs: a colour for each run, the metric told apart by dashes. */
export function buildCompared(chart: Chart, runs: { run: Run; table: Table }[], axis: Axis, smoothing: Smoothing, seeds: { runs: string[]; text?: string }[] = []): Model | null {
  const model = empty(chart, axis);
  runs.forEach(({ run, table }, k) => {
    const x = xOf(table, axis);
    if (!x) return;
    const specs = metricsOf(chart, table).filter((spec) => spec.style !== "thin" && spec.style !== "dashed");
    for (const spec of specs.slice(0, 2)) {
      for (const line of linesOf(run, table, spec, x, smoothing, runs.length < 3)) {
        model.lines.push({ ...line, colour: `run${k + 1}`, label: specs.length > 1 ? `${run.name}, ${spec.label.replace(/, (smoothed|held out)$/, "")}` : run.name, metric: `${run.id} ${line.metric}` });
      }
    }
  });
  for (const group of seeds) seedBand(model, group.runs, group.text ?? "seeds");
  if (model.spread) model.note = [model.note, `shaded: between the ${model.spread.text}`].filter(Boolean).join(" ");
  return model.lines.length ? model : null;
}
