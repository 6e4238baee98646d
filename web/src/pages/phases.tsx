// Where a step goes: the plan against what was measured, on one axis of seconds, a table, and every step.
import type { JSX } from "preact";
import { ChartView, Legend, modelOf } from "../chart/card";
import type { Chart, PhaseRow, Run } from "../data";
import * as format from "../format";
import { ticks } from "../math";
import type { Opened } from "../store";
import { phaseClass, PHASES } from "../theme";
import { Empty, useWidth } from "../ui";

interface Row {
  label: string;
  parts: { name: string; seconds: number }[];
  total: number;
}

export const inOrder = (rows: PhaseRow[]): PhaseRow[] => [...rows].sort((a, b) => PHASES.indexOf(phaseClass(a.name)) - PHASES.indexOf(phaseClass(b.name)));

export function PlanBars({ rows, height = 88, left = 70 }: { rows: Row[]; height?: number; left?: number }): JSX.Element {
  const [ref, width] = useWidth<HTMLDivElement>();
  const most = Math.max(...rows.map((row) => row.total), 1e-9) * 1.04;
  const px = (s: number): number => left + (s / most) * (width - left - 6);
  const barHeight = 22;
  const axisAt = rows.length * 33 + 2;
  return (
    <div ref={ref}>
      {width > 0 && (
        <svg class="plan-bars" width={width} height={Math.max(height, axisAt + 16)} role="img" aria-label={rows.map((r) => `${r.label}: ${r.parts.map((p) => `${p.name} ${format.seconds(p.seconds)}`).join(", ")}`).join("; ")}>
          {ticks(0, most, width > 380 ? 4 : 3).map((v, k, all) => (
            <g key={v}>
              <line class="gridline" x1={px(v)} x2={px(v)} y1={0} y2={axisAt} />
              <text x={Math.min(px(v), width - 14)} y={axisAt + 12} text-anchor="middle">{format.number(v)}{k === all.length - 1 ? " s" : ""}</text>
            </g>
          ))}
          {rows.map((row, k) => {
            let at = 0;
            const y = 2 + k * 33;
            return (
              <g key={row.label}>
                <text class="rowlab" x={left - 9} y={y + 15} text-anchor="end">{row.label}</text>
                {row.parts.map((part) => {
                  const [x1, x2] = [px(at), px(at + part.seconds)];
                  at += part.seconds;
                  const text = `${part.name} ${format.number(part.seconds, 2)}`;
                  return (
                    <g key={part.name}>
                      <rect class={`f-${phaseClass(part.name)}`} x={x1} y={y} width={Math.max(0.5, x2 - x1 - 1)} height={barHeight} rx={1.5}><title>{`${part.name} ${format.seconds(part.seconds)}`}</title></rect>
                      {x2 - x1 > text.length * 6.6 + 12 && ["rollout", "update", "eval"].includes(phaseClass(part.name)) && <text class="inbar" x={x1 + 7} y={y + 15}>{text}</text>}
                    </g>
                  );
                })}
                {px(row.total) + 60 < width && <text x={px(row.total) + 7} y={y + 15}>{format.seconds(row.total)}</text>}
              </g>
            );
          })}
        </svg>
      )}
    </div>
  );
}

export function barsOf(run: Run): Row[] {
  const phases = run.phases!;
  const rows = inOrder(phases.rows);
  const planned = rows.filter((r) => r.planned).map((r) => ({ name: r.name, seconds: r.planned! }));
  const measured = rows.filter((r) => r.seconds > 0).map((r) => ({ name: r.name, seconds: r.seconds }));
  const sum = (parts: { seconds: number }[]): number => parts.reduce((s, p) => s + p.seconds, 0);
  return [
    ...(planned.length ? [{ label: "plan", parts: planned, total: phases.planned_total ?? sum(planned) }] : []),
    { label: "measured", parts: measured, total: Math.max(sum(measured), 0) },
  ];
}

/** How much more than planned: as a share, and as a factor where a share would be hundreds. */
const signed = (v: number | null | undefined): string => (v === null || v === undefined ? format.DASH : v >= 2 ? `${format.number(1 + v, 2)}\u2009\u00d7` : `${v >= 0 ? "+" : "\u2212"}${format.percent(Math.abs(v), 0)}`);

/** The two or three phases that matter, and the rest as one row. */
export function PhaseTable({ run, most = 3 }: { run: Run; most?: number }): JSX.Element {
  const sorted = [...run.phases!.rows].sort((a, b) => b.seconds - a.seconds);
  const named = sorted.slice(0, sorted.length > most ? most - 1 : most);
  const rest = sorted.slice(named.length);
  const sum = (key: "seconds" | "share"): number => rest.reduce((s, r) => s + r[key], 0);
  return (
    <table class="ph">
      <thead><tr><th><span class="hide">phase</span></th><th>a step</th><th>share</th><th>against plan</th></tr></thead>
      <tbody>
        {named.map((r) => (
          <tr key={r.name}>
            <td><i class={`swatch c-${phaseClass(r.name)}`} />{r.name}{r.parts?.length > 0 && <span>{r.parts.map((p) => `${p.name} ${format.number(p.seconds, 2)}`).join(", ")}</span>}</td>
            <td>{format.seconds(r.seconds)}</td><td>{format.percent(r.share, 0)}</td><td>{signed(r.against_plan)}</td>
          </tr>
        ))}
        {rest.length > 0 && <tr><td title={rest.map((r) => `${r.name} ${format.seconds(r.seconds)}`).join(", ")}><i class="swatch c-idle" />all else</td><td>{format.seconds(sum("seconds"))}</td><td>{format.percent(sum("share"), 0)}</td><td>{format.DASH}</td></tr>}
      </tbody>
    </table>
  );
}

export function StepCard({ opened, chart }: { opened: Opened; chart: Chart | null }): JSX.Element {
  const run = opened.run.value;
  const model = chart ? modelOf(chart, opened) : null;
  const median = run.phases?.median_of;
  return (
    <article class="card" data-chart={chart?.id ?? "step"} data-state={model ? "drawn" : "explained"}>
      <div class="card-head"><h3>Where a step goes <span>{run.phases ? `${run.phases.planned_total ? "plan against " : ""}median of ${format.plural(median ?? 0, "step")}, seconds` : ""}</span></h3></div>
      {run.phases ? <><PlanBars rows={barsOf(run)} /><PhaseTable run={run} /></> : <Empty title="No times yet">They come with the first step.</Empty>}
      {model && <><h4>every step, seconds</h4><ChartView model={model} height={run.phases ? 82 : 180} /></>}
      {model && !run.phases && <Legend model={model} />}
    </article>
  );
}
