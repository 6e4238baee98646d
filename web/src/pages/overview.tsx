// The first screen: sentence, four numbers, two charts, six small charts, the head of the samples.
import { useSignal } from "@preact/signals";
import type { ComponentChildren, JSX } from "preact";
import { useMemo, useRef } from "preact/hooks";
import { ChartCard, ChartMenu, ChartView, here, modelOf, why } from "../chart/card";
import type { Chart, Event, Run, VerdictPart } from "../data";
import * as format from "../format";
import { clamp } from "../math";
import { FEWEST_TO_JUDGE, type Model } from "../chart/model";
import { go, href } from "../route";
import { SamplesHead } from "../samples/head";
import { catalogue, page, type Opened } from "../store";
import { phaseClass } from "../theme";
import { Copy, Empty, LevelMark, useSeen } from "../ui";
import { Absent, chartsOf } from "./charts";
import { StepCard } from "./phases";

export function Strip({ run }: { run: Run }): JSX.Element {
  const f = run.facts;
  const size = typeof f.parameters === "number" ? `${format.number(f.parameters)} parameters` : f.parameters;
  const device = f.devices && f.devices > 1 ? `${f.devices} \u00d7 ${f.device}` : f.device;
  const line = [f.task, size, f.algorithm, f.batch, device].filter(Boolean).join(" \u00b7 ");
  const steps = f.step === null ? format.DASH : f.steps ? `${format.count(f.step)} of ${format.count(f.steps)}` : format.count(f.step);
  const facts: [string, string][] = [["steps", steps], ["time", format.duration(f.seconds)], ["tokens", format.number(f.tokens)], ["seed", f.seed === null ? format.DASH : String(f.seed)]];
  return (
    <section class="head" aria-label="Run">
      <div><h1>{run.name}</h1><p>{line || "no facts were recorded"}</p></div>
      <dl class="facts">{facts.map(([k, v]) => <div key={k}><dt>{k}</dt><dd>{v}</dd></div>)}</dl>
    </section>
  );
}

/** While it runs: the phase, how long, how far, how long still. */
function Now({ run }: { run: Run }): JSX.Element | null {
  const s = run.state;
  if (!["running", "starting", "quiet"].includes(s.kind)) return null;
  const told = s.kind !== "running" && run.verdict.parts.length > 0; // the verdict begins with it
  const share = s.done !== null && s.total ? clamp(s.done / s.total, 0, 1) : null;
  const known = [!told && s.text, share !== null && `${format.count(s.done)} of ${format.count(s.total)} ${s.unit ?? ""}`, s.left_s !== null && `about ${format.duration(s.left_s)} left`];
  if (!known.some(Boolean)) return null;
  return (
    <div class="now">
      {share !== null && <progress max={1} value={share} aria-label="progress in this phase" />}
      <span>{known.filter(Boolean).join(" \u00b7 ")}</span>
    </div>
  );
}

const chartHref = (part: VerdictPart): string | null => {
  const chart = part.chart ? catalogue.value.find((c) => c.id === part.chart) : null;
  const first = part.evidence?.find((e) => e.first !== null && e.last !== null);
  void first;
  return chart ? href(chart.page) + (chart.page === "overview" ? "" : `${href(chart.page).includes("?") ? "&" : "?"}chart=${encodeURIComponent(chart.id)}`) : null;
};

function Sentence({ part, strong }: { part: VerdictPart; strong: boolean }): JSX.Element {
  const evidence = (part.evidence ?? []).map((e) => e.text || `${e.metric} ${format.number(e.value)}`).join("; ");
  const text = strong ? <b>{part.text}</b> : part.text;
  const to = chartHref(part);
  return to ? <a href={to} title={evidence || undefined}>{text} </a> : <span title={evidence || undefined}>{text} </span>;
}

/** Python writes commands and keys between backticks: here they can be copied. */
function Ticked({ text }: { text: string }): JSX.Element {
  return <>{text.split(/`([^`]+)`/).map((part, k) => (k % 2 ? <Copy key={k} text={part} /> : part))}</>;
}

export function Verdict({ run }: { run: Run }): JSX.Element {
  const said = run.verdict.parts.filter((p) => p.id !== "next" && p.text);
  const next = run.verdict.parts.find((p) => p.id === "next" && p.text);
  return (
    <section class={`verdict ${run.verdict.level}`} aria-label="Verdict" data-level={run.verdict.level}>
      <p>{said.length ? said.map((part, k) => <Sentence key={part.id} part={part} strong={k === 0} />) : <b>Nothing to judge yet.</b>}</p>
      {next && (
        <p class="next">
          <span class="tag">next</span><Ticked text={next.text} /> {next.key && !next.text.includes(`\`${next.key}\``) && <Copy text={next.key} />} {next.gain && <span>{next.gain}</span>}
        </p>
      )}
    </section>
  );
}

function Question({ title, children, page: to, note }: { title: string; children: ComponentChildren; page: string; note: ComponentChildren }): JSX.Element {
  return (
    <article class="card q">
      <h2><a href={href(to)}>{title}</a></h2>
      {children}
      <p title={typeof note === "string" ? note : undefined}>{note}</p>
    </article>
  );
}

const side = (v: number | string | null, unit: string | null): string => (typeof v === "string" ? v : unit === "share" || unit === "%" ? format.percent(v, 1) : format.number(v));

function LearningCard({ run }: { run: Run }): JSX.Element {
  const q = run.questions.learning;
  const at = (v: number): string => `${clamp((v - q!.bar!.min) / (q!.bar!.max - q!.bar!.min || 1), 0, 1) * 100}%`;
  const pair = q && q.from !== null && q.to !== null && q.from !== undefined;
  return (
    <Question title="Is it learning?" page="learning" note={q?.note ?? "no step yet"}>
      <div class={`big ${!pair && (q?.value ?? "").length > 18 ? "long" : ""}`}>{pair ? <>{side(q.from, q.unit)}<em>{"\u2192"}</em>{side(q.to, q.unit)}</> : (q?.value ?? format.DASH)}</div>
      <div class="track">
        {q?.bar && q.bar.from !== null && q.bar.to !== null && (
          <>
            <i class="span" style={{ left: at(Math.min(q.bar.from, q.bar.to)), width: `calc(${at(Math.max(q.bar.from, q.bar.to))} - ${at(Math.min(q.bar.from, q.bar.to))})` }} />
            <i class="was" style={{ left: at(q.bar.from) }} title={`first: ${side(q.bar.from, q.unit)}`} /><i class="is" style={{ left: at(q.bar.to) }} title={`last: ${side(q.bar.to, q.unit)}`} />
          </>
        )}
      </div>
    </Question>
  );
}

function BoundCard({ run }: { run: Run }): JSX.Element {
  const q = run.questions.bound;
  return (
    <Question title="What bounds it?" page="speed" note={q?.detail || "no times yet"}>
      <div class="big">{q?.value ?? format.DASH}<small>{q?.note}</small></div>
      <div class="bar">{q?.shares?.map((s) => <i key={s.phase} class={`c-${phaseClass(s.phase)}`} style={{ flex: `${s.share}` }} title={`${s.phase} ${format.percent(s.share)}`} />)}</div>
    </Question>
  );
}

function WrongCard({ run }: { run: Run }): JSX.Element {
  const q = run.questions.wrong;
  const note = <>{q?.note ?? "no rule has been asked"} <a href={href("log", { view: "rules" })}>why</a></>;
  return (
    <Question title="Is anything wrong?" page="log" note={note}>
      <div class={`big ${(q?.value ?? "").length > 22 ? "long" : ""}`} title={q?.value}>{q?.value ?? format.DASH}</div>
      <div class="rules" role="img" aria-label={q?.note}>{q?.rules?.map((r) => <i key={r.rule} class={r.level} title={`${r.title || r.rule}${r.why ? `: ${r.why}` : ""}`} />)}</div>
    </Question>
  );
}

function FitsCard({ run }: { run: Run }): JSX.Element {
  const q = run.questions.fits;
  const unit = q?.unit ?? "GiB";
  const used = typeof q?.value === "number" ? q.value : null;
  const full = Math.max(q?.limit ?? 0, q?.planned ?? 0, used ?? 0) || 1;
  return (
    <Question title="Does it fit?" page="memory" note={q?.note ?? "no memory was measured"}>
      <div class="big">
        {used === null ? (q?.value ?? format.number(q?.planned)) : format.number(used, used < 1 ? 2 : 3)}
        {q?.limit ? <small>of {format.number(q.limit)} {unit} {used === null && q.planned ? "planned" : "that may be used"}</small> : used !== null && <small>{unit}</small>}
      </div>
      <div class="track">
        {used !== null && <i class="used" style={{ width: `${(100 * used) / full}%` }} title={`measured: ${format.number(used)} ${unit}`} />}
        {q?.planned ? <b style={{ left: `calc(${(100 * q.planned) / full}% - ${q.planned >= full ? 2 : 0}px)` }} title={`planned: ${format.number(q.planned)} ${unit}`} /> : null}
      </div>
    </Question>
  );
}

/** The best held-out score of a run with checkpoints is marked where it was reached. */
function markBest(model: Model): Model {
  const line = model.lines.find((l) => l.metric === "eval/pass@1" || l.metric === "eval/score");
  if (!line) return model;
  let best = -1;
  line.y.forEach((v, i) => v !== null && (best < 0 || v > line.y[best]!) && (best = i));
  const at = best >= 0 ? line.x[best] : null;
  if (at === null || line.y.filter((v) => v !== null).length < 3 || line.y.slice(best + 1).every((v) => v === null)) return model;
  return { ...model, marks: [...model.marks, { x: at, kind: "best", text: `best: ${model.axis === "step" ? `step ${at}` : format.number(at)}` }] };
}

function Mini({ chart, opened }: { chart: Chart; opened: Opened }): JSX.Element {
  const model = modelOf(chart, opened);
  const log = useSignal(!!chart.log);
  const table = useSignal(false);
  const value = useRef<HTMLElement>(null);
  const [ref, seen] = useSeen<HTMLElement>();
  const run = opened.run.value;
  const main = chart.metrics.find((m) => m.name && opened.table.has(m.name) && m.style !== "dashed")?.name;
  const names = new Set(chart.metrics.map((m) => m.name));
  const rule = run.findings.find((f) => [...names].some((n) => n && (f.metric === n || String(f.evidence ?? "").includes(n))));
  const band = chart.metrics.map((m) => run.bands[m.name ?? ""]).find(Boolean);
  const few = opened.table.steps.length < FEWEST_TO_JUDGE;
  const level = rule?.level ?? (few || !model || (!band && !run.questions.wrong) ? "unknown" : "ok");
  const last = main ? format.value(opened.table.last(main), chart.unit) : format.DASH;
  const hover = (text: string | null): void => {
    const spoken = text?.split("  \u00b7  ");
    if (value.current) value.current.textContent = spoken && spoken.length > 1 ? spoken[1].replace(/^(raw|smoothed|mean) /, "") : last;
  };
  const hint = band?.text || (chart.note ?? "").split(". ")[0].replace(/\.$/, "");
  return (
    <article class="card mini" ref={ref} data-chart={chart.id} data-state={model ? "drawn" : "explained"}>
      <div class="mt">
        <LevelMark level={level} title={rule?.title ?? (level === "ok" ? "healthy" : few ? `${FEWEST_TO_JUDGE} steps are needed to judge` : "not judged")} />
        <span title={chart.title}>{chart.title}</span>
        {model && <ChartMenu {...{ model, log, table }} />}
      </div>
      {model ? (
        <>
          <div class="mv"><b ref={value}>{last}</b> <span>{format.unitText(chart.unit)}</span></div>
          {seen && <ChartView model={model} height={60} small log={log.value} hover={hover} />}
          <div class="mh" title={chart.note ?? hint}>{rule ? rule.title : few ? `${FEWEST_TO_JUDGE} steps are needed to judge` : hint}</div>
        </>
      ) : (
        <Empty title="not recorded">{why(chart, opened)}</Empty>
      )}
    </article>
  );
}

function Trouble({ run }: { run: Run }): JSX.Element | null {
  const s = run.state;
  const error = typeof s.error === "string" ? s.error : s.error ? `${s.error.type ?? "Error"}: ${s.error.text ?? ""}` : null;
  if (s.kind !== "failed" && !error) return null;
  const said = run.verdict.parts.map((p) => `${p.text} ${p.key ?? ""}`).join(" ");
  const last = run.events.filter((e) => e.level !== "info" || e.kind === "checkpoint").slice(-4);
  return (
    <section class="alert bad" role="alert">
      <b>{error && !said.includes(error) ? "The last error" : "What happened last"}</b>
      {error && !said.includes(error) && <pre class="mono">{error}</pre>}
      {s.resume && !said.includes(s.resume) && <p>Continue with <Copy text={s.resume} /></p>}
      {last.length > 0 && <Events events={last} />}
    </section>
  );
}

export function Events({ events }: { events: Event[] }): JSX.Element {
  return (
    <ul class="events">
      {events.map((e, k) => <li key={k}><span class="mono">{format.clock(e.at)}</span> {e.step !== null && <span>step {e.step}</span>} {format.visible(e.text ?? "")}</li>)}
    </ul>
  );
}

function Notes({ run }: { run: Run }): JSX.Element | null {
  const damaged = run.damaged.map((d) => `${d.file}${d.line ? `, line ${d.line}` : ""}: ${d.text}`);
  if (!damaged.length && !run.missing.length) return null;
  return (
    <>
      {damaged.length > 0 && <section class="alert"><b>Part of this folder cannot be read.</b> The rest is shown. {damaged.slice(0, 4).join(" \u00b7 ")}{damaged.length > 4 && ` and ${damaged.length - 4} more`}</section>}
      {run.missing.length > 0 && <section class="alert plain">{run.missing.map((m) => m.text).join(" \u00b7 ")}</section>}
    </>
  );
}

function Starting({ run }: { run: Run }): JSX.Element {
  const choices = run.plan?.choices ?? [];
  return (
    <section class="card starting">
      <div class="card-head"><h3>No step yet <span>{choices.length ? "this is what Trimtab chose" : run.state.text}</span></h3></div>
      {choices.length > 0 && (
        <table class="list"><tbody>{choices.slice(0, 12).map((c) => <tr key={c.key}><td class="mono">{c.key}</td><td class="mono">{format.json(c.value)}</td><td>{c.why}</td></tr>)}</tbody></table>
      )}
      <p class="note"><a href={href("plan")}>the whole plan</a></p>
    </section>
  );
}

export function Overview(): JSX.Element {
  const opened = here();
  const run = opened.run.value;
  opened.tick.value;
  const charts = chartsOf("overview", opened);
  const small = charts.filter((c) => c.small && !replaced(c, opened));
  const left = charts.filter((c) => c.small && !small.slice(0, 6).includes(c));
  const main = charts.filter((c) => !c.small && c.kind !== "stack");
  const stack = charts.find((c) => c.kind === "stack");
  const started = opened.table.steps.length > 0;
  return (
    <>
      <Strip run={run} />
      <Now run={run} />
      <Verdict run={run} />
      <Trouble run={run} />
      <section class="cards" aria-label="Four questions">
        <LearningCard run={run} /><BoundCard run={run} /><WrongCard run={run} /><FitsCard run={run} />
      </section>
      {run.damaged.length > 0 && <Notes run={{ ...run, missing: [] }} />}
      {started ? (
        <>
          <section class="two">
            {main.slice(0, 1).map((chart) => <MainChart key={chart.id} chart={chart} opened={opened} />)}
            <StepCard opened={opened} chart={stack ?? null} />
          </section>
          <section class="minis">{small.slice(0, 6).map((chart) => <Mini key={chart.id} chart={chart} opened={opened} />)}</section>
          {main.length > 1 && <section class="charts">{main.slice(1).map((chart) => <MainChart key={chart.id} chart={chart} opened={opened} />)}</section>}
        </>
      ) : (
        <>
          <Starting run={run} />
          <Absent charts={charts} opened={opened} folded />
        </>
      )}
      <SamplesHead opened={opened} more={() => go("samples")} />
      <Notes run={{ ...run, damaged: [] }} />
      {started && <Absent charts={left.filter((c) => !modelOf(c, opened))} opened={opened} folded />}
      <span hidden data-shown={page.value} />
    </>
  );
}

/** With a reference its KL takes the place of the engine's distance, with a critic its explained variance that of the length. */
function replaced(chart: Chart, { table }: Opened): boolean {
  const [reference, critic] = [table.has("policy/kl_ref"), table.has("value/explained_variance")];
  return { logprob_gap: reference, kl_ref: !reference, length: critic, explained_variance: !critic }[chart.id] ?? false;
}

function MainChart({ chart, opened }: { chart: Chart; opened: Opened }): JSX.Element {
  const model = modelOf(chart, opened);
  const marked = useMemo(() => model && { ...markBest(model), note: null }, [model]);
  if (!marked) return <article class="card chart" data-chart={chart.id} data-state="explained"><div class="card-head"><h3>{chart.title}</h3></div><Empty title="Not recorded">{why(chart, opened)}</Empty></article>;
  return <ChartCard model={marked} height={296} labels sub={opened.table.steps.length < FEWEST_TO_JUDGE ? `${FEWEST_TO_JUDGE} steps are needed to judge` : ""} title={chart.note ?? ""} />;
}
