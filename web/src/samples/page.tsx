// Samples: steps on the left, groups in the middle, the conversation on the right.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { here } from "../chart/card";
import type { Sample, SampleIndex } from "../data";
import * as format from "../format";
import { param, set } from "../route";
import { source, type Opened } from "../store";
import { Choose, Empty, VirtualList } from "../ui";
import { ChipLegend, Chips } from "./chips";
import { firstLine, groupsOf, keep, matcher, sortGroups, type Group, type Sort } from "./groups";
import { lastStep } from "./head";
import { OverTime } from "./overtime";
import { SampleView } from "./sample";
import { Shown } from "./text";

/** A bar for every recorded step, as high as its mean reward; one is chosen. */
function StepBars({ index, step }: { index: SampleIndex[]; step: number }): JSX.Element {
  const means = index.map((i) => i.reward_mean ?? 0);
  const [low, high] = [Math.min(0, ...means), Math.max(1e-9, ...means)];
  const at = Math.max(0, index.findIndex((i) => i.step === step));
  const here = index[at];
  return (
    <div class="steps">
      <div class="step-bars" aria-hidden="true">
        {index.map((i, k) => <i key={i.step} class={k === at ? "on" : ""} title={`step ${i.step}: mean ${format.number(i.reward_mean)}`} style={{ height: `${8 + (92 * ((i.reward_mean ?? 0) - low)) / (high - low)}%` }} onClick={() => set({ step: String(i.step), group: null, sample: null })} />)}
      </div>
      <input type="range" aria-label="recorded step" min={0} max={index.length - 1} value={at} onInput={(e) => set({ step: String(index[Number(e.currentTarget.value)].step), group: null, sample: null })} />
      <p><b>step {here?.step}</b> mean {format.number(here?.reward_mean, 2)}{here?.reward_min !== null && here?.reward_min !== undefined && `, ${format.number(here.reward_min, 2)} to ${format.number(here.reward_max, 2)}`}</p>
      <p>{format.plural(here?.rows ?? 0, "sample")}{here?.cut_off ? `, ${here.cut_off} cut off` : ""}{here?.failed ? `, ${here.failed} failed` : ""}</p>
    </div>
  );
}

function GroupRow({ group, on, gain, pick }: { group: Group; on: boolean; gain: number | null; pick: (sample?: number) => void }): JSX.Element {
  return (
    <div class={`group-row ${on ? "on" : ""}`} role="option" aria-selected={on} onClick={() => pick()}>
      <div class="mono clip"><Shown text={firstLine(group.prompt) || "(empty prompt)"} /></div>
      <div class="group-meta">
        <Chips samples={group.samples} choose={(k) => pick(k)} chosen={on ? Number(param("sample") ?? 0) : undefined} />
        <span>mean {format.number(group.mean, 2)}</span><span>spread {format.number(group.spread, 2)}</span><span>{format.number(group.tokens)} tokens</span>
        {gain !== null && <span>{gain >= 0 ? "+" : "\u2212"}{format.number(Math.abs(gain), 2)}</span>}
      </div>
    </div>
  );
}

function Hits({ opened, kind, q, regex }: { opened: Opened; kind: string; q: string; regex: boolean }): JSX.Element {
  const hits = useSignal<Sample[]>([]);
  const state = useSignal<{ text: string; cursor: string | null }>({ text: "", cursor: null });
  const ask = async (cursor: string | null): Promise<void> => {
    const search = source.value!.search;
    const { test, error } = matcher(q, regex);
    if (error) return void ((hits.value = []), (state.value = { text: error, cursor: null }));
    if (!search) {
      const all = Object.entries(opened.run.value.samples.rows).filter(([key]) => key.startsWith(`${kind}:`));
      hits.value = all.sort((a, b) => Number(b[0].split(":")[1]) - Number(a[0].split(":")[1])).flatMap(([key, rows]) => rows.filter(test).map((row) => ({ ...row, step: Number(key.split(":")[1]) })));
      return void (state.value = { text: `${format.plural(hits.value.length, "sample")} of those in this report`, cursor: null });
    }
    state.value = { text: "searching", cursor: null };
    try {
      const found = await search(opened.run.value, { q, regex, kind, cursor });
      hits.value = cursor ? [...hits.value, ...found.hits] : found.hits;
      state.value = { text: `${format.plural(hits.value.length, "sample")} found${found.cursor ? " so far" : ""}`, cursor: found.cursor };
    } catch (problem) {
      state.value = { text: problem instanceof Error ? problem.message : String(problem), cursor: null };
    }
  };
  useEffect(() => {
    const timer = setTimeout(() => void ask(null), 150);
    return () => clearTimeout(timer);
  }, [q, regex, kind]);
  return (
    <div>
      <p class="note" aria-live="polite">{state.value.text}</p>
      <VirtualList count={hits.value.length} row={54} height={620} label="samples found" render={(k) => {
        const row = hits.value[k];
        const on = param("group") === String(row.prompt_id) && param("step") === String(row.step) && param("sample") === String(row.sample);
        return (
          <div key={k} class={`group-row ${on ? "on" : ""}`} role="option" aria-selected={on} onClick={() => set({ step: String(row.step), group: String(row.prompt_id), sample: String(row.sample), by: "number" })}>
            <div class="mono clip"><Shown text={firstLine(row.prompt ?? "")} /></div>
            <div class="group-meta"><Chips samples={[row]} /><span>step {row.step}</span><span class="clip mono"><Shown text={firstLine(row.completion ?? "").slice(0, 80)} /></span></div>
          </div>
        );
      }} />
      {state.value.cursor && <p class="toolbar"><button type="button" class="button" onClick={() => void ask(state.value.cursor)}>Search further</button></p>}
    </div>
  );
}

function useRows(opened: Opened, kind: string, step: number | null): Sample[] | null {
  const rows = useSignal<Sample[] | null>(null);
  useEffect(() => {
    let wanted = true;
    rows.value = null;
    if (step !== null) void source.value!.samples(opened.run.value, kind, step).then((found) => wanted && (rows.value = found), () => wanted && (rows.value = []));
    return () => void (wanted = false);
  }, [opened, kind, step]);
  return rows.value;
}

export function SamplesPage(): JSX.Element {
  const opened = here();
  const { samples } = opened.run.value;
  const kind = param("kind") ?? (samples.index.some((i) => i.kind === "train") || !samples.index.length ? "train" : "eval");
  const inReport = source.value!.mode === "report";
  const index = samples.index.filter((i) => i.kind === kind && (!inReport || samples.rows[`${kind}:${i.step}`])).sort((a, b) => a.step - b.step);
  const step = param("step") !== null ? Number(param("step")) : (index.at(-1)?.step ?? lastStep(opened, kind));
  const rows = useRows(opened, kind, step);
  if (!samples.index.length) {
    const told = opened.run.value.missing.find((m) => /sample/.test(m.what))?.text;
    return <section class="card page-card"><Empty title="No samples">{told ?? "This run recorded none. Set observe.samples_every: 10 to keep some of every tenth step."}</Empty></section>;
  }
  return <Browser {...{ opened, kind, index, step: step ?? 0, rows }} />;
}

function Browser({ opened, kind, index, step, rows }: { opened: Opened; kind: string; index: SampleIndex[]; step: number; rows: Sample[] | null }): JSX.Element {
  const { samples } = opened.run.value;
  const q = param("q") ?? "";
  const regex = param("re") === "1";
  const all = groupsOf(rows ?? [], step);
  const earlier = useRows(opened, kind, param("sort") === "gain" ? (index.find((i) => i.step < step)?.step ?? null) : null);
  const before = new Map(groupsOf(earlier ?? [], 0).flatMap((g) => (g.mean === null ? [] : [[g.id, g.mean] as [string, number]])));
  const tasks = [...new Set(all.flatMap((g) => (g.task ? [g.task] : [])))];
  const parts = [...new Set(all.flatMap((g) => g.samples.flatMap((s) => Object.keys(s.rewards ?? {}))))];
  const sort = (param("sort") ?? "mean") as Sort;
  const filter = { kind: param("filter") ?? "all", task: param("task"), part: param("part"), above: param("above") === "1", bound: Number(param("bound") ?? 0.5) };
  const groups = sortGroups(all.filter((g) => keep(g, filter)), sort, before);
  const at = Math.max(0, groups.findIndex((g) => g.id === param("group")));
  const group = groups.find((g) => g.id === param("group")) ?? all.find((g) => g.id === param("group")) ?? groups[0];
  const wanted = Number(param("sample") ?? 0);
  const row = group && (param("by") === "number" ? group.samples.find((s) => s.sample === wanted) : group.samples[wanted]) || group?.samples[0];
  const pick = (g: Group, sample?: number): void => set({ step: String(step), group: g.id, sample: sample === undefined ? null : String(sample), by: null });

  useEffect(() => {
    const key = (e: KeyboardEvent): void => {
      if (/^(INPUT|TEXTAREA|SELECT)$/.test((e.target as HTMLElement).tagName) || !groups.length) return;
      const by = e.key === "j" ? 1 : e.key === "k" ? -1 : 0;
      if (by) pick(groups[Math.min(groups.length - 1, Math.max(0, at + by))]);
    };
    addEventListener("keydown", key);
    return () => removeEventListener("keydown", key);
  });

  const has = (k: string): boolean => samples.index.some((i) => i.kind === k);
  return (
    <>
      <div class="toolbar">
        <span class="segments" role="group" aria-label="kind of samples">
          {(["train", "eval"] as const).filter(has).map((k) => <button key={k} type="button" class="button" aria-pressed={kind === k} onClick={() => set({ kind: k, step: null, group: null, sample: null })}>{k === "train" ? "Training" : "Evaluation"}</button>)}
        </span>
        <input type="search" placeholder="search prompts, completions, failures" aria-label="search samples" value={q} onInput={(e) => set({ q: e.currentTarget.value || null })} />
        <label class="check"><input type="checkbox" checked={regex} onChange={(e) => set({ re: e.currentTarget.checked ? "1" : null })} /> expression</label>
        <Choose label="sort" value={sort} options={[["mean", "worst first"], ["best", "best first"], ["spread", "spread"], ["length", "length"], ["gain", "gain since first"], ["recorded", "as recorded"]]} onChange={(v) => set({ sort: v === "mean" ? null : v })} />
        <Choose label="show" value={filter.kind} options={[["all", "all groups"], ["mixed", "mixed groups"], ["cut", "cut off"], ["failed", "failed"]]} onChange={(v) => set({ filter: v === "all" ? null : v })} />
        {tasks.length > 1 && <Choose label="task" value={filter.task ?? ""} options={[["", "all"], ...tasks.map((t): [string, string] => [t, t])]} onChange={(v) => set({ task: v || null })} />}
        {parts.length > 0 && <Choose label="part" value={filter.part ?? ""} options={[["", "any"], ...parts.map((p): [string, string] => [p, p])]} onChange={(v) => set({ part: v || null })} />}
        {filter.part && <><Choose label="" value={filter.above ? "1" : "0"} options={[["0", "below"], ["1", "above"]]} onChange={(v) => set({ above: v === "1" ? "1" : null })} /><input type="number" aria-label="bound" step="0.1" value={filter.bound} onChange={(e) => set({ bound: e.currentTarget.value })} /></>}
      </div>
      <section class="browser">
        <aside class="card">
          {index.length ? <StepBars index={index} step={step} /> : <Empty title="none" />}
          <ChipLegend />
          {samples.left_out > 0 && <p class="note">This report holds a selection: {format.count(samples.left_out)} of {format.count(samples.total)} samples were left out.</p>}
        </aside>
        <div class="card groups" role="listbox" aria-label="groups">
          {q ? <Hits {...{ opened, kind, q, regex }} /> : rows === null ? <Empty title="Reading" /> : groups.length ? (
            <VirtualList count={groups.length} row={54} height={660} label="groups of this step" reveal={at} render={(k) => <GroupRow key={groups[k].id} group={groups[k]} on={groups[k] === group} gain={sort === "gain" && before.has(groups[k].id) && groups[k].mean !== null ? groups[k].mean! - before.get(groups[k].id)! : null} pick={(s) => pick(groups[k], s)} />} />
          ) : <Empty title="No group is like that">{all.length ? "Change the filter." : "Nothing was recorded for this step."}</Empty>}
        </div>
        <div class="card conversation">
          {row ? <><SampleView key={`${step} ${group.id} ${row.sample}`} row={row} /><OverTime opened={opened} kind={kind} id={group.id} now={{ ...row, step }} /></> : <Empty title="No sample is chosen" />}
        </div>
      </section>
    </>
  );
}
