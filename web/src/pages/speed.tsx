// Speed: plan against measured, useful work, every chart of the catalogue, and the profile's kernels.
import type { JSX } from "preact";
import { here } from "../chart/card";
import type { Run } from "../data";
import * as format from "../format";
import { Card, Empty } from "../ui";
import { ChartGrid, ChartTools } from "./charts";
import { barsOf, PhaseTable, PlanBars } from "./phases";

/** Sampled, with reward, trained, in groups with signal: what of the work teaches. */
function Funnel({ run }: { run: Run }): JSX.Element {
  const most = Math.max(...run.funnel.map((f) => f.count), 1);
  return (
    <Card title="Useful work" sub="samples of the last 20 steps">
      {run.funnel.length ? (
        <table class="funnel"><tbody>
          {run.funnel.map((f) => (
            <tr key={f.name}><td>{f.name}</td><td><div class="funnel-bar"><i class="c-metric" style={{ width: `${(100 * f.count) / most}%` }} /></div></td><td class="num">{format.count(Math.round(f.count))}</td><td class="num">{format.percent(f.count / most, 0)}</td></tr>
          ))}
        </tbody></table>
      ) : <Empty title="Not recorded">The run did not count its samples.</Empty>}
    </Card>
  );
}

function Kernels({ run }: { run: Run }): JSX.Element | null {
  const { kernels, gaps, trace, steps } = run.profile ?? { kernels: null, gaps: null };
  if (!kernels?.length) return null;
  return (
    <>
      <h2 class="section">Kernels</h2>
      <section class="charts">
        <Card class="wide" title="Kernels" sub={`${steps ? `steps ${steps.join(" to ")}` : "profiled steps"}${trace ? `; the trace is in ${trace}` : ""}`}>
          <div class="scroll-x"><table class="list">
            <thead><tr><th>kernel</th><th>phase</th><th class="num">time</th><th class="num">share</th><th class="num">calls</th></tr></thead>
            <tbody>{kernels.slice(0, 40).map((k, i) => <tr key={i}><td class="mono">{k.name.slice(0, 120)}</td><td>{k.phase ?? format.DASH}</td><td class="num">{format.seconds(k.seconds)}</td><td class="num">{format.percent(k.share)}</td><td class="num">{format.count(k.calls)}</td></tr>)}</tbody>
          </table></div>
        </Card>
        {!!gaps?.length && (
          <Card class="wide" title="Gaps" sub="the device waits for the host"><table class="list">
            <thead><tr><th>after</th><th class="num">seconds</th></tr></thead>
            <tbody>{gaps.slice(0, 20).map((g, i) => <tr key={i}><td class="mono">{g.after.slice(0, 120)}</td><td class="num">{format.seconds(g.seconds)}</td></tr>)}</tbody>
          </table></Card>
        )}
      </section>
    </>
  );
}

export function Speed(): JSX.Element {
  const opened = here();
  const run = opened.run.value;
  const bound = run.verdict.parts.find((p) => p.id === "bound");
  return (
    <>
      {bound?.text && <p class="lead">{bound.text} {bound.evidence?.length > 0 && <span>{bound.evidence.map((e) => e.text || `${e.metric} ${format.number(e.value)}`).join(" \u00b7 ")}</span>}</p>}
      <ChartTools opened={[opened]} />
      <section class="charts">
        <Card title="Where a step goes" sub={run.phases ? `median of ${format.plural(run.phases.median_of ?? 0, "step")}` : ""}>
          {run.phases ? <><PlanBars rows={barsOf(run)} /><PhaseTable run={run} most={12} /></> : <Empty title="No times yet">They come with the first step.</Empty>}
        </Card>
        <Funnel run={run} />
      </section>
      <ChartGrid page="speed" opened={opened} />
      <Kernels run={run} />
    </>
  );
}
