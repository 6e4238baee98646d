// The shapes of the data that Python hands over (src/trimtab/observe/web/data.py). Every field may be missing in an old folder: `complete` fills in.

export type Level = "ok" | "warn" | "bad" | "unknown";

/** Little-endian floats in base64, of 4 bytes each, or of 8 where 4 would not hold whole units. */
export interface Column {
  f32?: string;
  f64?: string;
  n: number;
}

export interface State {
  kind: "starting" | "running" | "quiet" | "failed" | "stopped" | "finished" | "unknown";
  text: string;
  phase: string | null;
  since: number | null;
  done: number | null;
  total: number | null;
  unit: string | null;
  left_s: number | null;
  error: string | { type?: string; text?: string } | null;
  resume: string | null;
}

export interface Facts {
  task: string | null;
  parameters: number | string | null;
  algorithm: string | null;
  batch: string | null;
  device: string | null;
  devices: number | null;
  step: number | null;
  steps: number | null;
  seconds: number | null;
  tokens: number | null;
  seed: number | null;
  started_at: number | null;
  ended_at: number | null;
  folder: string | null;
  host: string | null;
  command: string | null;
  versions: Record<string, string>;
}

export interface RunHead {
  id: string;
  name: string;
  state: State;
  stage: string;
  facts: Facts;
  level: Level;
  findings: number | Finding[];
  last: { reward: number | null; score: number | null; seconds_a_step: number | null; peak_gib: number | null };
  at: number | null;
}

export interface Evidence {
  metric: string;
  value: number | null;
  text: string;
  first: number | null;
  last: number | null;
}

export interface VerdictPart {
  id: "state" | "learning" | "bound" | "next";
  text: string;
  level: Level;
  evidence: Evidence[];
  chart: string | null;
  key?: string | null;
  gain?: string | null;
}

export interface Questions {
  learning: {
    value: string;
    from: number | string | null;
    to: number | string | null;
    low: number | null;
    high: number | null;
    unit: string | null;
    note: string;
    bar: { min: number; max: number; from: number | null; to: number | null } | null;
  } | null;
  bound: { value: string; note: string; detail: string; shares: { phase: string; share: number }[] } | null;
  wrong: { value: string; note: string; rules: { rule: string; title: string; level: string; why: string }[] } | null;
  fits: { value: number | string | null; unit: string | null; limit: number | null; planned: number | null; note: string } | null;
}

export interface Finding {
  rule: string;
  level: Level;
  title: string;
  metric?: string;
  healthy?: string;
  evidence?: string;
  cause?: string;
  remedy?: string;
  change?: string;
  first?: number | null;
  last?: number | null;
  [more: string]: unknown;
}

export interface Band {
  text: string;
  spans: { from: number; to: number; low: number | null; high: number | null }[];
}

export interface PhaseRow {
  name: string;
  seconds: number;
  share: number;
  planned: number | null;
  against_plan: number | null;
  parts: { name: string; seconds: number }[];
}

export interface MemoryPhase {
  name: string;
  components: Record<string, number>;
  predicted: number | null;
  measured: number | null;
  left_out: number | null;
  binds: boolean;
}

export interface Event {
  at: number | null;
  step: number | null;
  level: string;
  kind: string;
  text: string;
}

export interface Sample {
  step?: number;
  prompt_id: string;
  sample: number;
  prompt: string;
  completion: string;
  turns?: Turn[] | null;
  rewards?: Record<string, number | null> | null;
  reward: number | null;
  finish?: string | null;
  tokens?: number | null;
  failure?: string | null;
  group_mean?: number | null;
  group_std?: number | null;
  advantage?: number | null;
  answer?: unknown;
  task?: string | null;
  prompt_tokens?: number | null;
  chosen?: string | null;
  right?: boolean | null;
}

export interface Turn {
  role: string;
  content: string;
  tool_calls?: unknown;
  [more: string]: unknown;
}

export interface SampleIndex {
  step: number;
  kind: "train" | "eval";
  rows: number;
  reward_min: number | null;
  reward_mean: number | null;
  reward_max: number | null;
  cut_off: number;
  failed: number;
}

export interface Histogram {
  edges: number[];
  counts: number[][];
}

// [track, name, start in us, duration in us, step, arguments]
export type Span = [number | string, string, number, number, number | null, Record<string, unknown> | null];

export interface Trace {
  spans: Span[];
  tracks: string[];
  counters: Record<string, [number, number][]>;
  left_out: number;
  file?: string;
}

export interface Kernel {
  name: string;
  seconds: number;
  calls: number;
  share: number;
  phase: string | null;
}

export interface Profile {
  kernels: Kernel[] | null;
  gaps: { after: string; seconds: number; at: number }[] | null;
  memory: {
    timeline?: { at: number[]; components: Record<string, number[]> };
    largest?: { bytes: number; where: string; component: string | null }[];
    peak_bytes?: number;
  } | null;
  trace?: string | null;
  steps?: number[];
}

export interface PlanChange {
  text: string;
  overrides: string[];
  seconds: number | null;
  peak_bytes: number | null;
  fits: boolean | null;
  note?: string | null;
}

export interface Run extends RunHead {
  verdict: { level: Level; parts: VerdictPart[] };
  questions: Questions;
  steps: Column | null;
  columns: Record<string, Column>;
  starts: number[];
  not_finite: Record<string, number[]>;
  bands: Record<string, Band>;
  smoothing: Record<string, number>;
  phases: { rows: PhaseRow[]; median_of: number | null; planned_total: number | null; measured_total: number | null } | null;
  memory: { limit: number | null; device: number | null; phases: MemoryPhase[]; host: boolean; events: Event[] } | null;
  funnel: { name: string; count: number }[];
  findings: Finding[];
  /** What would have been found at earlier steps; the server is asked instead. */
  earlier: { step: number; findings: Finding[] }[];
  plan: {
    choices: { key: string; value: unknown; why: string | null }[];
    offers: (Record<string, unknown> | string)[];
    changes: PlanChange[];
    assumed: unknown;
    step_seconds: number | null;
    peak_bytes?: number | null;
  } | null;
  config: { key: string; value: unknown; source: "you" | "default" | "chosen"; why: string | null }[];
  events: Event[];
  distributions: {
    steps: number[];
    lengths: Histogram | null;
    rewards: Histogram | null;
    groups: number[][] | null;
    advantages?: Histogram | null;
  } | null;
  samples: { index: SampleIndex[]; rows: Record<string, Sample[]>; left_out: number; total: number };
  evaluations: { steps: number[]; results: Record<string, Record<string, [boolean | null, number | null, number | null]>> | null };
  trace: Trace | null;
  profile: Profile | null;
  limit_tokens?: number | null;
  missing: { what: string; text: string }[];
  damaged: { file: string; line: number | null; text: string }[];
}

export interface Chart {
  id: string;
  title: string;
  page: "overview" | "learning" | "speed" | "memory";
  metrics: { name?: string | null; prefix?: string | null; without?: string[]; label: string; style?: "line" | "thin" | "smooth" | "dots" | "dashed" }[];
  unit: string | null;
  kind: "lines" | "stack" | "heat" | "bars";
  log?: boolean;
  zero?: boolean;
  stages?: string[];
  small?: boolean;
  note?: string | null;
  order?: number;
}

export interface Compare {
  runs: string[];
  table: { label: string; values: (number | string | null)[]; best: number | null; unit: string | null }[];
  differ: { key: string; values: unknown[] }[];
  equal: number;
  versions: { key: string; values: unknown[] }[];
  bands?: { runs: string[]; text?: string }[] | Record<string, string[]> | null;
}

export interface Document {
  version: number;
  written: number | null;
  mode: "report" | "serve";
  catalogue: Chart[];
  runs: Run[];
  compare: Compare | null;
}

const NO_STATE: State = {
  kind: "unknown", text: "", phase: null, since: null, done: null, total: null, unit: null, left_s: null, error: null, resume: null,
};
const NO_FACTS: Facts = {
  task: null, parameters: null, algorithm: null, batch: null, device: null, devices: null, step: null, steps: null, seconds: null, tokens: null,
  seed: null, started_at: null, ended_at: null, folder: null, host: null, command: null, versions: {},
};

export function completeHead<T extends Partial<RunHead>>(head: T): T & RunHead {
  return {
    name: head.id ?? "run",
    stage: "rl",
    level: "unknown",
    at: null,
    findings: 0,
    ...head,
    id: String(head.id ?? head.name ?? "run"),
    state: { ...NO_STATE, ...head.state },
    facts: { ...NO_FACTS, ...head.facts, versions: head.facts?.versions ?? {} },
    last: { reward: null, score: null, seconds_a_step: null, peak_gib: null, ...head.last },
  };
}

/** A run with every field there, so that no page has to ask. */
export function complete(run: Partial<Run>): Run {
  return {
    ...completeHead(run),
    verdict: { level: "unknown", ...run.verdict, parts: run.verdict?.parts ?? [] },
    questions: { ...{ learning: null, bound: null, wrong: null, fits: null }, ...run.questions },
    steps: run.steps ?? null,
    columns: run.columns ?? {},
    starts: run.starts ?? [],
    not_finite: run.not_finite ?? {},
    bands: run.bands ?? {},
    smoothing: run.smoothing ?? {},
    phases: run.phases?.rows?.length ? run.phases : null,
    memory: run.memory ? { ...run.memory, phases: run.memory.phases ?? [], events: run.memory.events ?? [] } : null,
    funnel: run.funnel ?? [],
    findings: Array.isArray(run.findings) ? run.findings : [],
    earlier: run.earlier ?? [],
    plan: run.plan
      ? { ...run.plan, choices: run.plan.choices ?? [], offers: run.plan.offers ?? [], changes: run.plan.changes ?? [] }
      : null,
    config: run.config ?? [],
    events: run.events ?? [],
    distributions: run.distributions?.steps?.length ? run.distributions : null,
    samples: { left_out: 0, total: 0, ...run.samples, index: run.samples?.index ?? [], rows: run.samples?.rows ?? {} },
    evaluations: { steps: run.evaluations?.steps ?? [], results: run.evaluations?.results ?? null },
    trace: run.trace?.spans?.length ? { ...run.trace, tracks: run.trace.tracks ?? [], counters: run.trace.counters ?? {} } : null,
    profile: run.profile ?? null,
    missing: run.missing ?? [],
    damaged: run.damaged ?? [],
  };
}
