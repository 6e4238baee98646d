// Several runs: results, the keys that differ, the catalogue's charts laid over each other, phases, the same prompt side by side.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useMemo } from "preact/hooks";
import { ChartCard, smoothing } from "../chart/card";
import { buildCompared } from "../chart/model";
import type { Compare, Sample } from "../data";
import * as format from "../format";
import { axis, go, param, set } from "../route";
import { groupsOf } from "../samples/groups";
import { SampleView } from "../samples/sample";
import { catalogue, chooseRuns, chosen, compared, heads, live, source, type Opened } from "../store";
import { Card, Choose, Empty } from "../ui";
import { ChartTools } from "./charts";
import { inOrder, PlanBars } from "./phases";

const show = (v: unknown, unit: string | null): string => {
  if (typeof v !== "number") return v === null || v === undefined ? format.DASH : format.json(v);
  if (unit === "GiB") return `${format.number(v)} GiB`;
  if (unit === "bytes") return format.bytes(v);
  if (unit === "duration") return format.duration(v);
  return format.value(v, unit);
};

/** A column for each run, in its colour. */
function Table({ runs, rows, first }: { runs: Opened[]; rows: { label: string; cells: string[]; best?: number | null; mono?: boolean }[]; first: string }): JSX.Element {
  return (
    <div class="scroll-x"><table class="list compare">
      <thead><tr><th>{first}</th>{runs.map((o, k) => <th key={o.run.value.id}><i class={`swatch c-run${k + 1}`} /> <button type="button" class="link" onClick={() => go("overview", { run: o.run.value.id })}>{o.run.value.name}</button></th>)}</tr></thead>
      <tbody>{rows.map((r) => <tr key={r.label}><td class={r.mono ? "mono" : ""}>{r.label}</td>{r.cells.map((c, k) => <td key={k} class={`${r.best === k ? "best" : ""} ${r.mono ? "mono" : ""}`}>{c}</td>)}</tr>)}</tbody>
    </table></div>
  );
}

function Differences({ compare, runs }: { compare: Compare; runs: Opened[] }): JSX.Element {
  const rank = (key: string): number => (key.startsWith("learn") ? 0 : key.startsWith("run") ? 2 : 1);
  const differ = [...compare.differ].sort((a, b) => rank(a.key) - rank(b.key));
  const at = runs.map((o) => compare.runs.indexOf(o.run.value.id));
  const pick = (values: unknown[]): string[] => at.map((i) => show(values[i], null));
  return (
    <>
      <Card class="wide" title="Keys that differ" sub={`${format.plural(compare.equal, "key")} are equal`}>
        {differ.length ? <Table first="key" runs={runs} rows={differ.map((d) => ({ label: d.key, cells: pick(d.values), mono: true }))} /> : <Empty title="None">The runs have the same config.</Empty>}
      </Card>
      {compare.versions?.length > 0 && <Card class="wide" title="Versions and machine that differ"><Table first="what" runs={runs} rows={compare.versions.map((v) => ({ label: v.key, cells: pick(v.values), mono: true }))} /></Card>}
    </>
  );
}

function SamePrompt({ runs }: { runs: Opened[] }): JSX.Element | null {
  const rows = useSignal<Map<string, { step: number; rows: Sample[] }>>(new Map());
  const kind = param("kind") ?? "eval";
  useEffect(() => {
    const read = async (): Promise<void> => {
      const found = new Map<string, { step: number; rows: Sample[] }>();
      for (const o of runs) {
        const steps = o.run.value.samples.index.filter((i) => i.kind === kind).map((i) => i.step);
        if (!steps.length) continue;
        const step = Math.max(...steps);
        found.set(o.run.value.id, { step, rows: await source.value!.samples(o.run.value, kind, step).catch(() => []) });
      }
      rows.value = found;
    };
    void read();
  }, [kind, runs.map((o) => o.run.value.id).join()]);
  const sets = [...rows.value.values()].map((f) => new Set(f.rows.map((r) => String(r.prompt_id))));
  const common = sets.length > 1 ? [...sets[0]].filter((id) => sets.every((s) => s.has(id))) : [];
  if (!common.length) return null;
  const id = param("prompt") && common.includes(param("prompt")!) ? param("prompt")! : common[0];
  return (
    <>
      <h2 class="section">The same prompt</h2>
      <div class="toolbar"><Choose label="prompt" value={id} options={common.slice(0, 300).map((p): [string, string] => [p, p])} onChange={(v) => set({ prompt: v })} /></div>
      <section class="side-by-side">
        {runs.map((o) => {
          const found = rows.value.get(o.run.value.id);
          const row = found && groupsOf(found.rows, found.step).find((g) => g.id === id)?.samples[0];
          return row ? <div class="card" key={o.run.value.id}><SampleView row={row} heading={`${o.run.value.name}, step ${found!.step}`} /></div> : null;
        })}
      </section>
    </>
  );
}

function Phases({ runs }: { runs: Opened[] }): JSX.Element | null {
  const rows = runs.filter((o) => o.run.value.phases).map((o) => {
    const parts = inOrder(o.run.value.phases!.rows).filter((r) => r.seconds > 0).map((r) => ({ name: r.name, seconds: r.seconds }));
    return { label: o.run.value.name.slice(-22), parts, total: parts.reduce((s, p) => s + p.seconds, 0) };
  });
  return rows.length ? <Card class="wide" title="Where a step goes" sub="median, seconds"><PlanBars rows={rows} left={160} /></Card> : null;
}

export function ComparePage(): JSX.Element {
  const runs = compared.value;
  const answer = useSignal<Compare | null>(null);
  const ids = chosen.value.join();
  useEffect(() => {
    if (chosen.value.length > 1) void source.value!.compare(chosen.value).then((c) => (answer.value = c), () => (answer.value = null));
  }, [ids]);
  if (chosen.value.length < 2) return <Empty title="Choose two runs or more">{live.value ? <>Tick them in the <a href="#/runs">list of runs</a>.</> : "This report holds one."}</Empty>;
  if (runs.length < chosen.value.length) return <Empty title="Opening the runs" />;
  return <Compared runs={runs} compare={answer.value} />;
}

function Compared({ runs, compare }: { runs: Opened[]; compare: Compare | null }): JSX.Element {
  const pairs = runs.map((o) => (o.tick.value, { run: o.run.value, table: o.table }));
  const stages = new Set(runs.map((o) => o.run.value.stage));
  const charts = catalogue.value.filter((c) => c.kind === "lines" && (!c.stages?.length || c.stages.some((s) => stages.has(s))));
  const ids = runs.map((o) => o.run.value.id).join();
  const seeds = compare?.bands;
  const models = useMemo(() => charts.flatMap((chart) => buildCompared(chart, pairs, axis.value, smoothing(), Array.isArray(seeds) ? seeds : []) ?? []), [ids, runs.map((o) => o.tick.value).join(), axis.value, smoothing(), compare]);
  const at = runs.map((o) => compare?.runs.indexOf(o.run.value.id) ?? -1);
  return (
    <>
      <h1>Compare {format.plural(runs.length, "run")}</h1>
      {!live.value && heads.value.length > 2 && <div class="toolbar">{heads.value.map((h) => <label key={h.id} class="check"><input type="checkbox" checked={chosen.value.includes(h.id)} onChange={(e) => chooseRuns(e.currentTarget.checked ? [...chosen.value, h.id] : chosen.value.filter((c) => c !== h.id))} /> {h.name}</label>)}</div>}
      <section class="charts">
        {compare && <Card class="wide" title="Results" sub="bold where the difference is larger than its error"><Table first="" runs={runs} rows={compare.table.map((r) => ({ label: r.label, cells: at.map((i) => show(r.values[i], r.unit)), best: r.best === null ? null : at.indexOf(r.best) }))} /></Card>}
        {compare && <Differences compare={compare} runs={runs} />}
        <Phases runs={runs} />
      </section>
      <ChartTools opened={runs} samples />
      <section class="charts">{models.map((model) => <ChartCard key={model.id} model={model} />)}</section>
      <SamePrompt runs={runs} />
    </>
  );
}
