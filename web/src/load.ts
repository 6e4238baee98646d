// Where the data comes from: the report holds it, the server is asked. Pages see one interface and do not know which.
import { complete, completeHead } from "./data";
import type { Chart, Compare, Document, Event, Finding, Run, RunHead, Sample, State, Trace } from "./data";
import { floats, Table, type Values } from "./table";

export interface SearchPage {
  hits: Sample[];
  cursor: string | null;
  searched: string;
}

export interface Live {
  rows(rows: Record<string, unknown>[]): void;
  now(state: State): void;
  event(event: Event): void;
  restart(): void;
  connection(up: boolean): void;
}

export interface Source {
  mode: "report" | "serve";
  written: number | null;
  catalogue: Chart[];
  heads(): Promise<RunHead[]>;
  open(id: string): Promise<{ run: Run; table: Table }>;
  /** The run without its numbers: these arrive row by row. */
  judge?(id: string): Promise<Run>;
  /** Steps at which it is known what would have been found, and what. */
  lookedBack(run: Run, table: Table): number[];
  findingsAt(run: Run, step: number): Promise<Finding[]>;
  samples(run: Run, kind: string, step: number): Promise<Sample[]>;
  search?(run: Run, query: { q: string; regex: boolean; kind: string; cursor: string | null }): Promise<SearchPage>;
  trace?(run: Run, from: number, until: number): Promise<Trace>;
  compare(ids: string[]): Promise<Compare | null>;
  plan?(body: unknown): Promise<unknown>;
  follow?(id: string, live: Live): () => void;
}

async function unzip(base64: string): Promise<string> {
  const text = atob(base64.trim());
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

export async function reportSource(element: HTMLElement): Promise<Source> {
  const document_ = JSON.parse(await unzip(element.textContent ?? "")) as Document;
  element.remove(); // the text is unpacked: the browser need not keep both
  const runs = new Map<string, Run>((document_.runs ?? []).map((raw) => complete(raw)).map((run) => [run.id, run]));
  return {
    mode: "report",
    written: document_.written,
    catalogue: document_.catalogue ?? [],
    heads: async () => [...runs.values()],
    open: async (id) => {
      const run = runs.get(id);
      if (!run) throw new Error(`This report holds no run "${id}".`);
      return { run, table: Table.of(run) };
    },
    lookedBack: (run) => run.earlier.map((look) => look.step),
    findingsAt: async (run, step) => run.earlier.find((look) => look.step === step)?.findings ?? [],
    samples: async (run, kind, step) => run.samples.rows[`${kind}:${step}`] ?? [],
    compare: async () => document_.compare,
  };
}

const MOST_LOOKS_BACK = 20;

/** So many of them at most, in equal distances, without the last. */
function spread(steps: number[], most: number): number[] {
  const count = Math.min(most, steps.length - 1);
  return [...new Set(Array.from({ length: Math.max(0, count) }, (_, k) => steps[Math.floor(((k + 1) * steps.length) / (count + 1)) - 1]))];
}

async function get<T>(path: string): Promise<T> {
  const answer = await fetch(path, { headers: { accept: "application/json" } });
  if (!answer.ok) throw new Error(`${path}: the server answered ${answer.status} ${await answer.text().then((t) => t.slice(0, 300))}`);
  return answer.json();
}

/** A 4-byte length, a JSON header of that length, then float32 columns, the steps first, and after them the float64 columns of `wide`. */
export function parseColumns(buffer: ArrayBuffer): { steps: number[]; columns: Map<string, Values> } {
  const view = new DataView(buffer);
  const length = view.getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length))) as { names: string[]; wide: string[]; rows: number };
  let offset = 4 + length;
  const next = (size: 4 | 8): Values => {
    const values = floats(view, offset, header.rows, size);
    offset += size * header.rows;
    return values;
  };
  const steps = next(4) as number[];
  const wide = new Set(header.wide);
  const narrow = header.names.filter((name) => !wide.has(name)).map((name): [string, Values] => [name, next(4)]);
  return { steps, columns: new Map([...narrow, ...header.wide.map((name): [string, Values] => [name, next(8)])]) };
}

async function fetchTable(id: string): Promise<Table> {
  const answer = await fetch(`/api/runs/${encodeURIComponent(id)}/metrics`);
  const table = new Table();
  if (!answer.ok) return table;
  const { steps, columns } = parseColumns(await answer.arrayBuffer());
  table.steps = steps;
  for (const [name, values] of columns) table.set(name, values);
  return table;
}

export async function serverSource(): Promise<Source> {
  const first: { runs: RunHead[] | null; catalogue?: Chart[] } = await get("/api/runs");
  const source: Source = {
    mode: "serve",
    written: null,
    catalogue: first.catalogue ?? [],
    heads: async () => {
      const runs = (first.runs ?? (await get<{ runs: RunHead[] }>("/api/runs")).runs).map(completeHead);
      first.runs = null; // the first list came with the catalogue; later ones are asked for
      return runs;
    },
    open: async (id) => {
      const path = `/api/runs/${encodeURIComponent(id)}`;
      const [raw, table] = await Promise.all([get<Partial<Run> & { catalogue?: Chart[] }>(path), fetchTable(id)]);
      if (raw.catalogue?.length) source.catalogue = raw.catalogue;
      if (raw.steps && !table.steps.length) return { run: complete(raw), table: Table.of(complete(raw)) };
      return { run: complete(raw), table };
    },
    lookedBack: (_, table) => spread(table.steps.filter((step) => step > 0), MOST_LOOKS_BACK),
    findingsAt: async (run, step) => (await get<{ findings: Finding[] }>(`/api/runs/${encodeURIComponent(run.id)}/findings?step=${step}`)).findings,
    judge: async (id) => complete(await get<Partial<Run>>(`/api/runs/${encodeURIComponent(id)}`)),
    samples: async (run, kind, step) => {
      const answer = await get<{ rows?: Sample[] } | Sample[]>(`/api/runs/${encodeURIComponent(run.id)}/samples?step=${step}&kind=${kind}`);
      return Array.isArray(answer) ? answer : (answer.rows ?? []);
    },
    search: async (run, { q, regex, kind, cursor }) => {
      const query = new URLSearchParams({ q, kind, ...(regex ? { regex: "1" } : {}), ...(cursor ? { cursor } : {}) });
      const answer = await get<Record<string, unknown>>(`/api/runs/${encodeURIComponent(run.id)}/search?${query}`);
      const hits = (answer.hits ?? answer.rows ?? []) as Sample[];
      return { hits, cursor: (answer.cursor as string | null) ?? null, searched: String(answer.text ?? "") };
    },
    trace: (run, from, until) => get<Trace>(`/api/runs/${encodeURIComponent(run.id)}/trace?from=${from}&until=${until}`),
    compare: (ids) => get<Compare>(`/api/compare?runs=${ids.map(encodeURIComponent).join(",")}`),
    plan: async (body) => {
      const answer = await fetch("/api/plan", {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
      });
      const result = await answer.json().catch(() => ({ error: `the server answered ${answer.status}` }));
      if (!answer.ok) throw new Error(String(result.error ?? result.detail ?? `the server answered ${answer.status}`));
      return result;
    },
    follow: (id, live) => {
      const events = new EventSource(`/api/runs/${encodeURIComponent(id)}/events`);
      const on = (name: string, act: (data: never) => void): void =>
        events.addEventListener(name, (message) => act(JSON.parse((message as MessageEvent).data || "null") as never));
      on("rows", (data: { rows?: Record<string, unknown>[] }) => live.rows(Array.isArray(data) ? data : (data.rows ?? [])));
      on("now", (data: State) => live.now(data));
      on("event", (data: Event) => live.event(data));
      events.addEventListener("restart", () => live.restart());
      events.onopen = () => live.connection(true);
      events.onerror = () => live.connection(false);
      return () => events.close();
    },
  };
  return source;
}
