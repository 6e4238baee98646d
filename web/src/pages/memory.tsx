// Memory: a bar of components for each phase, with the measured peak, the limit and the device; then over time, events, and a profile's snapshot.
import type { JSX } from "preact";
import { ChartCard, here } from "../chart/card";
import { empty, type Model } from "../chart/model";
import type { MemoryPhase, Run } from "../data";
import * as format from "../format";
import { ticks } from "../math";
import { Card, Empty, useWidth } from "../ui";
import { ChartGrid, ChartTools } from "./charts";
import { Events } from "./overview";

const OTHER = 5; // small components share one shade and one name in the legend

/** Components have no colour of their own: shades of one neutral, the same component the same shade in every phase. */
function shadeOf(phases: MemoryPhase[]): Map<string, number> {
  const totals = new Map<string, number>();
  for (const phase of phases) for (const [name, size] of Object.entries(phase.components ?? {})) totals.set(name, Math.max(totals.get(name) ?? 0, size));
  return new Map([...totals].sort((a, b) => b[1] - a[1]).map(([name], k) => [name, Math.min(k, OTHER)]));
}

function PhaseBars({ run }: { run: Run }): JSX.Element {
  const [ref, width] = useWidth<HTMLDivElement>();
  const memory = run.memory!;
  const shades = shadeOf(memory.phases);
  const sum = (p: MemoryPhase): number => Object.values(p.components ?? {}).reduce((a, b) => a + b, 0);
  const peak = Math.max(...memory.phases.map((p) => Math.max(sum(p) + (p.left_out ?? 0), p.measured ?? 0, p.predicted ?? 0)), 1);
  // A limit far away would press the bars into the corner: then it is said, not drawn.
  const near = (v: number | null): v is number => v !== null && v < peak * 4;
  const most = Math.max(peak, near(memory.limit) ? memory.limit : 0, near(memory.device) ? memory.device : 0) * 1.03;
  const left = 92;
  const px = (b: number): number => left + (b / most) * (width - left - 8);
  const bottom = memory.phases.length * 40 + 6;
  const unit = most > 2 ** 29 ? 2 ** 30 : 2 ** 20;
  return (
    <div ref={ref}>
      {width > 0 && (
        <svg class="plan-bars" width={width} height={bottom + 20} role="img" aria-label={memory.phases.map((p) => `${p.name}: planned ${format.bytes(p.predicted ?? sum(p))}, measured ${format.bytes(p.measured)}`).join("; ")}>
          {ticks(0, most / unit, 5).map((v) => <g key={v}><line class="gridline" x1={px(v * unit)} x2={px(v * unit)} y1={0} y2={bottom} /><text x={px(v * unit)} y={bottom + 14} text-anchor="middle">{format.number(v)}</text></g>)}
          {memory.phases.map((phase, k) => {
            const y = 6 + k * 40;
            let at = 0;
            return (
              <g key={phase.name}>
                <text class="rowlab" x={left - 10} y={y + 15} text-anchor="end">{phase.name}</text>
                {phase.binds && <text x={left - 10} y={y + 28} text-anchor="end" class="binds">binds</text>}
                {Object.entries(phase.components ?? {}).map(([name, size]) => {
                  const [x1, x2] = [px(at), px(at + size)];
                  at += size;
                  return <rect key={name} class={`shade${shades.get(name)}`} x={x1} y={y} width={Math.max(0, x2 - x1 - 0.75)} height={22}><title>{`${name}: ${format.bytes(size)}`}</title></rect>;
                })}
                {phase.left_out ? <rect class="leftout" x={px(at)} y={y + 0.5} width={Math.max(0, px(at + phase.left_out) - px(at))} height={21}><title>{`not accounted for: ${format.bytes(phase.left_out)}`}</title></rect> : null}
                {phase.measured !== null && phase.measured !== undefined && <path class="measured" d={`M${px(phase.measured) - 1.25} ${y - 4}h2.5v30h-2.5z`}><title>{`measured: ${format.bytes(phase.measured)}`}</title></path>}
              </g>
            );
          })}
          {near(memory.limit) && <line class="limit" x1={px(memory.limit)} x2={px(memory.limit)} y1={0} y2={bottom}><title>{`limit: ${format.bytes(memory.limit)}`}</title></line>}
          {near(memory.device) && memory.device !== memory.limit && <line class="device" x1={px(memory.device)} x2={px(memory.device)} y1={0} y2={bottom}><title>{`device: ${format.bytes(memory.device)}`}</title></line>}
        </svg>
      )}
      <ul class="legend">
        {[...shades].filter(([, k]) => k < OTHER).map(([name, k]) => <li key={name}><i class={`swatch shade${k}`} />{name}</li>)}
        {shades.size > OTHER && <li title={[...shades].filter(([, k]) => k === OTHER).map(([name]) => name).join(", ")}><i class={`swatch shade${OTHER}`} />{shades.size - OTHER} smaller</li>}
        {memory.phases.some((p) => p.left_out) && <li><i class="swatch leftout" />not accounted for</li>}
        <li><i class="swatch tick" />measured peak</li>
        {memory.limit && <li><i class="swatch limitline" />limit, {format.bytes(memory.limit)}</li>}
        {memory.device && memory.device !== memory.limit && <li>device, {format.bytes(memory.device)}</li>}
      </ul>
    </div>
  );
}

function PhaseList({ run }: { run: Run }): JSX.Element {
  return (
    <div class="scroll-x"><table class="list">
      <thead><tr><th>phase</th><th class="num">planned</th><th class="num">measured</th><th class="num">planned over measured</th><th>largest parts</th></tr></thead>
      <tbody>{run.memory!.phases.map((p) => {
        const planned = p.predicted ?? Object.values(p.components ?? {}).reduce((a, b) => a + b, 0);
        const largest = Object.entries(p.components ?? {}).sort((a, b) => b[1] - a[1]).slice(0, 3);
        return <tr key={p.name}><td>{p.name}{p.binds && <span class="tag mut inline">binds</span>}</td><td class="num">{format.bytes(planned)}</td><td class="num">{format.bytes(p.measured)}</td><td class="num">{p.measured ? format.number(planned / p.measured, 2) : format.DASH}</td><td>{largest.map(([n, b]) => `${n} ${format.bytes(b)}`).join(", ")}</td></tr>;
      })}</tbody>
    </table></div>
  );
}

/** At the present slope: the step at which host memory would be used up. */
function HostNote({ run, left, slope }: { run: Run; left: number | null; slope: number | null }): JSX.Element | null {
  if (left === null || slope === null || slope <= 0.5) return null;
  const steps = Math.floor((left * 1024) / slope);
  const at = (run.facts.step ?? 0) + steps;
  return <p class="lead">Host memory grows by {format.number(slope)} MiB a step: it would be used up at about step {format.count(at)}{run.facts.steps && at > run.facts.steps ? ", after the run's end" : ""}.</p>;
}

function snapshotModel(run: Run): Model | null {
  const timeline = run.profile?.memory?.timeline;
  if (!timeline?.at?.length) return null;
  const model = empty({ id: "snapshot", title: "Memory of the profiled steps", page: "memory", metrics: [], unit: "GiB", kind: "stack" }, "step");
  const parts = Object.entries(timeline.components).slice(0, 3);
  const colours = ["metric", "metric2", "metric3"];
  model.stack = { x: timeline.at, parts: parts.map(([name, list], k) => ({ name, colour: colours[k], y: list.map((b) => b / 2 ** 30) })), share: false };
  return model;
}

function Snapshot({ run }: { run: Run }): JSX.Element | null {
  const memory = run.profile?.memory;
  if (!memory) return null;
  const model = snapshotModel(run);
  return (
    <>
      <h2 class="section">Snapshot</h2>
      <section class="charts">
        {model && <ChartCard model={model} sub="GiB by component" />}
        <Card title="Largest blocks at the peak" sub={format.bytes(memory.peak_bytes)}>
          <table class="list"><thead><tr><th class="num">size</th><th>where</th><th>component</th></tr></thead><tbody>{(memory.largest ?? []).slice(0, 50).map((b, k) => <tr key={k}><td class="num">{format.bytes(b.bytes)}</td><td class="mono">{b.where}</td><td>{b.component ?? format.DASH}</td></tr>)}</tbody></table>
        </Card>
      </section>
    </>
  );
}

export function MemoryPage(): JSX.Element {
  const opened = here();
  const run = opened.run.value;
  const events = run.memory?.events ?? [];
  return (
    <>
      <HostNote run={run} left={opened.table.last("memory/host_left_gib")} slope={opened.table.last("memory/host_slope_mib_per_step")} />
      <section class="charts">
        <Card class="wide" title={run.memory?.host ? "Host memory, by phase" : "Device memory, by phase"} sub={`plan's components, GiB`}>
          {run.memory?.phases.length ? <><PhaseBars run={run} /><PhaseList run={run} /></> : <Empty title="No plan of memory">The folder has no plan.json with phases: a run of this version writes one.</Empty>}
        </Card>
      </section>
      <ChartTools opened={[opened]} />
      <ChartGrid page="memory" opened={opened} />
      <section class="charts"><Card class="wide" title="Events" sub="recoveries, retries, budget moves, engine restarts">{events.length ? <Events events={events} /> : <Empty title="None">Nothing ran out of memory.</Empty>}</Card></section>
      <Snapshot run={run} />
    </>
  );
}
