// The plan explorer, where there is a server to ask: a form of keys, bars that move, the run's own values as outlines.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import type { Run } from "../data";
import * as format from "../format";
import { source } from "../store";
import { phaseClass } from "../theme";
import { Card, Copy } from "../ui";

const KEYS = [
  "learn.prompts_per_step", "learn.samples_per_prompt", "learn.max_new_tokens", "model.lora",
  "run.token_budget", "run.checkpoint_activations", "run.offload", "run.precision", "run.rollout.max_sequences", "run.rollout.kv_memory", "run.rollout.prefill_tokens", "run.reward_workers", "run.engine",
];
const MACHINE: [string, string][] = [["device", "device, for example H100"], ["devices", "number of devices"], ["device_memory", "memory of a device, for example 80GiB"]];

interface Answer {
  fits?: boolean;
  step_seconds?: Record<string, number> | null;
  measured?: { phases: Record<string, number>; others: Record<string, number>; note?: string } | null; // scaled by what this run measured
  phases?: { name: string; device_bytes?: number; host_bytes?: number; components?: Record<string, number> }[];
  limit?: { device?: number; host?: number } | null;
  notes?: string[];
  binds?: string | null;
  changes?: unknown[];
  error?: string;
  [more: string]: unknown;
}

function secondsOf(answer: Answer | null): { parts: [string, number][]; scaled: boolean } {
  const scaled = answer?.measured ?? null;
  const found = scaled ? { ...scaled.phases, ...scaled.others } : (answer?.step_seconds ?? {});
  // Communication is part of the phases that it falls into.
  return { parts: Object.entries(found).filter(([k, v]) => typeof v === "number" && v > 0 && k !== "total" && k !== "communication"), scaled: !!scaled };
}

const peakOf = (phase: NonNullable<Answer["phases"]>[number]): number => phase.device_bytes || phase.host_bytes || Object.values(phase.components ?? {}).reduce((a, b) => a + b, 0);

/** A row of bars; the outline is what the run has now. */
function Bars({ rows, text }: { rows: { name: string; now: number | null; asked: number | null; colour: string }[]; text: (v: number) => string }): JSX.Element {
  const most = Math.max(...rows.flatMap((r) => [r.now ?? 0, r.asked ?? 0]), 1e-9);
  return (
    <div class="ask-bars">
      {rows.map((r) => (
        <div key={r.name} class="ask-row">
          <span>{r.name}</span>
          <div><i class={`c-${r.colour}`} style={{ width: `${(100 * (r.asked ?? 0)) / most}%` }} />{r.now !== null && <b style={{ width: `${(100 * r.now) / most}%` }} title={`now: ${text(r.now)}`} />}</div>
          <span class="num">{r.asked === null ? format.DASH : text(r.asked)}</span>
        </div>
      ))}
    </div>
  );
}

export function Explorer({ run }: { run: Run }): JSX.Element {
  const values = useSignal<Record<string, string>>({});
  const machine = useSignal<Record<string, string>>({});
  const now = useSignal<Answer | null>(null);
  const answer = useSignal<Answer | null>(null);
  const problem = useSignal<string | null>(null);
  const asking = useRef(0);
  const overrides = Object.entries(values.value).filter(([, v]) => v.trim()).map(([k, v]) => `${k}=${v.trim()}`);
  const ask = async (): Promise<void> => {
    const mine = ++asking.current;
    const devices = Number(machine.value.devices);
    const body = { run: run.id, overrides, device: machine.value.device || null, devices: devices > 0 ? devices : null, device_memory: machine.value.device_memory || null };
    try {
      const found = (await source.value!.plan!(body)) as Answer;
      if (mine !== asking.current) return;
      answer.value = found;
      problem.value = found.error ?? null;
      if (!overrides.length && !body.device && !body.devices && !body.device_memory) now.value = found;
    } catch (error) {
      if (mine === asking.current) problem.value = error instanceof Error ? error.message : String(error);
    }
  };
  useEffect(() => {
    const timer = setTimeout(() => void ask(), 300);
    return () => clearTimeout(timer);
  }, [values.value, machine.value, run.id]);
  const config = new Map(run.config.map((c) => [c.key, format.json(c.value)]));
  const [asked, was] = [secondsOf(answer.value), secondsOf(now.value)];
  const names = [...new Set([...asked.parts, ...was.parts].map(([n]) => n))];
  const get = (parts: [string, number][], name: string): number | null => parts.find(([n]) => n === name)?.[1] ?? null;
  const total = (parts: [string, number][]): number => parts.reduce((s, [, v]) => s + v, 0);
  const phases = answer.value?.phases ?? [];
  return (
    <Card class="wide explorer" title="Try other settings" sub="the planner computes; nothing is written">
      <div class="ask">
        <form onSubmit={(e) => (e.preventDefault(), void ask())}>
          {MACHINE.map(([key, hint]) => <label key={key}><span>{key}</span><input type="text" placeholder={hint} value={machine.value[key] ?? ""} onInput={(e) => (machine.value = { ...machine.value, [key]: e.currentTarget.value })} /></label>)}
          {KEYS.filter((key) => config.has(key) || key.startsWith("learn")).map((key) => <label key={key}><span class="mono">{key}</span><input type="text" placeholder={config.get(key) ?? "auto"} value={values.value[key] ?? ""} onInput={(e) => (values.value = { ...values.value, [key]: e.currentTarget.value })} /></label>)}
          <p class="toolbar"><button type="button" class="button" onClick={() => ((values.value = {}), (machine.value = {}))}>Back to the run's settings</button></p>
        </form>
        <div aria-live="polite">
          {problem.value && <div class="alert bad">{problem.value}</div>}
          {answer.value && !problem.value && (
            <>
              <p class="lead">{answer.value.fits === false ? <><b>It does not fit.</b> {answer.value.binds ? `Bottleneck: ${answer.value.binds}` : ""}</> : <><b>{format.seconds(total(asked.parts))} a step</b>{was.parts.length > 0 && overrides.length > 0 && `, now ${format.seconds(total(was.parts))}`}</>}</p>
              <Bars rows={names.map((n) => ({ name: n, now: get(was.parts, n), asked: get(asked.parts, n), colour: phaseClass(n) }))} text={format.seconds} />
              {phases.length > 0 && <><h4>memory of each phase{answer.value.limit?.device ? `, of ${format.bytes(answer.value.limit.device)} that may be used` : ""}</h4><Bars rows={phases.map((p) => ({ name: p.name, asked: peakOf(p), now: now.value?.phases?.find((o) => o.name === p.name) ? peakOf(now.value!.phases!.find((o) => o.name === p.name)!) : null, colour: "metric2" }))} text={format.bytes} /></>}
              {(answer.value.changes ?? []).length > 0 && <><h4>single changes that would fit</h4><ul class="offers">{answer.value.changes!.map((c, k) => <li key={k}>{typeof c === "string" ? c : String((c as { text?: string }).text ?? JSON.stringify(c))}</li>)}</ul></>}
              <p class="note">{asked.scaled ? `Seconds: ${answer.value.measured?.note ?? "scaled by what this run measured over what was planned"}. ` : ""}{(answer.value.notes ?? []).join(" ")} Outlines: the run as it is.</p>
            </>
          )}
          {overrides.length > 0 && <p class="toolbar">Copy as overrides <Copy text={overrides.join(" ")} /></p>}
        </div>
      </div>
    </Card>
  );
}
