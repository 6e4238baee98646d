// Log: what happened, and what the rules say.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import { here } from "../chart/card";
import type { Event, Finding, Run } from "../data";
import * as format from "../format";
import { param, set } from "../route";
import { source } from "../store";
import type { Table } from "../table";
import { Card, Choose, Empty, LevelMark } from "../ui";

function Found({ finding }: { finding: Finding }): JSX.Element {
  const rows: [string, unknown][] = [["evidence", finding.evidence], ["healthy", finding.healthy], ["cause", finding.cause], ["remedy", finding.remedy]];
  return (
    <article class="card finding">
      <h3><LevelMark level={finding.level} /> {finding.title} <span>{finding.rule}</span></h3>
      <dl>{rows.filter(([, v]) => v).map(([k, v]) => <div key={k}><dt>{k}</dt><dd>{format.json(v)}</dd></div>)}</dl>
    </article>
  );
}

function Rules({ run }: { run: Run }): JSX.Element {
  const rules = run.questions.wrong?.rules ?? [];
  if (!rules.length) return <Empty title="No rule has been asked" />;
  const order = ["bad", "warn", "ok", "unjudged"];
  const sorted = [...rules].sort((a, b) => order.indexOf(a.level) - order.indexOf(b.level));
  return (
    <div class="scroll-x"><table class="list rules-list"><thead><tr><th /><th>rule</th><th>what it watches</th><th>why</th></tr></thead><tbody>
      {sorted.map((r) => <tr key={r.rule}><td><LevelMark level={r.level} /></td><td class="mono">{r.rule}</td><td>{r.title}</td><td>{r.why}</td></tr>)}
    </tbody></table></div>
  );
}

const MOST_EVENTS = 500;

function EventTable({ events }: { events: Event[] }): JSX.Element {
  const all = useSignal(false);
  const shown = all.value ? events : events.slice(-MOST_EVENTS);
  return (
    <>
      {shown.length < events.length && <p class="toolbar"><button type="button" class="button" onClick={() => (all.value = true)}>Show the {format.count(events.length - shown.length)} before these</button></p>}
      <div class="scroll-x"><table class="list events-list"><thead><tr><th>time</th><th class="num">step</th><th /><th>kind</th><th>text</th></tr></thead><tbody>
        {shown.map((e, k) => <tr key={k}><td class="mono nowrap">{format.clock(e.at)}</td><td class="num">{e.step ?? format.DASH}</td><td><LevelMark level={e.level} /></td><td>{e.kind}</td><td>{format.visible(e.text ?? "")}</td></tr>)}
      </tbody></table></div>
    </>
  );
}

/** Findings as they are, or as they would have read after an earlier step. */
function Findings({ run, table }: { run: Run; table: Table }): JSX.Element {
  const steps = source.value?.lookedBack(run, table) ?? [];
  const at = steps.includes(Number(param("at"))) ? Number(param("at")) : null;
  const earlier = useSignal<{ step: number; findings: Finding[] } | null>(null);
  const failed = useSignal<string | null>(null);
  useEffect(() => {
    failed.value = null;
    if (at === null) return;
    let current = true; // an answer to an earlier question is not shown
    source.value!.findingsAt(run, at).then((findings) => current && (earlier.value = { step: at, findings }), (error) => current && (failed.value = String(error)));
    return () => void (current = false);
  }, [run.id, at]);
  const known = at === null ? run.findings : earlier.value?.step === at ? earlier.value.findings : null;
  const now = table.steps.at(-1);
  return (
    <>
      <h2 class="section first">Findings</h2>
      {steps.length > 0 && (
        <div class="toolbar">
          <Choose label="as they read after step" value={String(at ?? "")} options={[...steps.map((step): [string, string] => [String(step), String(step)]), ["", now === undefined ? "the last" : `${now}, the last`]]} onChange={(step) => set({ at: step || null })} />
          {at !== null && known && <span>{known.length ? format.plural(known.length, "finding") : "nothing was found by then"}</span>}
        </div>
      )}
      {failed.value ? <Empty title="This cannot be shown">{failed.value}</Empty>
        : known === null ? <Empty title="Asking the rules" />
        : known.length ? <section class="charts findings">{known.map((f) => <Found key={f.rule} finding={f} />)}</section>
        : <Empty title={at === null ? "Nothing found" : `Nothing found after step ${at}`}>{at === null ? (run.questions.wrong?.note ?? "") : ""}</Empty>}
    </>
  );
}

export function Log(): JSX.Element {
  const opened = here();
  const run = opened.run.value;
  const level = param("level") ?? "all";
  const kind = param("event") ?? "all";
  const kinds = [...new Set(run.events.map((e) => e.kind))].sort();
  const events = run.events.filter((e) => (level === "all" || e.level === level || (level === "warn" && e.level === "error")) && (kind === "all" || e.kind === kind));
  return (
    <>
      <Findings run={run} table={opened.table} />
      <section class="charts"><Card class="wide" title="Rules" sub="hollow: could not judge, and why"><Rules run={run} /></Card></section>
      <h2 class="section">Events</h2>
      <div class="toolbar">
        <Choose label="level" value={level} options={[["all", "all"], ["warn", "warnings and errors"], ["error", "errors"]]} onChange={(v) => set({ level: v === "all" ? null : v })} />
        <Choose label="kind" value={kind} options={[["all", "all"], ...kinds.map((k): [string, string] => [k, k])]} onChange={(v) => set({ event: v === "all" ? null : v })} />
        <span>{format.plural(events.length, "event")}</span>
      </div>
      <section class="charts"><Card class="wide">{events.length ? <EventTable events={events} /> : <Empty title="No events">{run.events.length ? "None are like that." : "The folder has no events.jsonl: an older version wrote it, or nothing happened yet."}</Empty>}</Card></section>
      <Commands run={run} />
    </>
  );
}

function Commands({ run }: { run: Run }): JSX.Element | null {
  const facts: [string, string | null][] = [["command", run.facts.command], ["folder", run.facts.folder], ["host", run.facts.host], ...Object.entries(run.facts.versions)];
  const known = facts.filter(([, v]) => v);
  if (!known.length) return null;
  return <section class="charts"><Card class="wide" title="Machine and versions"><table class="list"><tbody>{known.map(([k, v]) => <tr key={k}><td class="key">{k}</td><td class="mono">{format.json(v)}</td></tr>)}</tbody></table></Card></section>;
}
