// A page of catalogue charts, with what this run did not record listed below, and why.
import type { ComponentChildren, JSX } from "preact";
import { useEffect } from "preact/hooks";
import { ChartCard, modelOf, smoothing, why } from "../chart/card";
import type { Chart } from "../data";
import { axis, param, set, zoom, zoomTo, type Axis } from "../route";
import { catalogue, xOf, type Opened } from "../store";
import { Choose } from "../ui";

export function chartsOf(page: string, opened: Opened): Chart[] {
  const stage = opened.run.value.stage;
  return catalogue.value.filter((chart) => chart.page === page && (!chart.stages?.length || chart.stages.includes(stage)));
}

export function ChartTools({ opened, samples }: { opened: Opened[]; samples?: boolean }): JSX.Element {
  const has = (a: Axis): boolean => opened.some((o) => xOf(o.table, a) !== null);
  const options: [Axis, string, boolean?][] = [["step", "step"], ["tokens", "tokens", !has("tokens")], ["time", "time", !has("time")]];
  if (samples) options.push(["samples", "samples", !has("samples")]);
  return (
    <div class="toolbar">
      <Choose label="by" value={axis.value} options={options} onChange={(a) => set({ axis: a === "step" ? null : a, zoom: null })} />
      <Choose label="smoothing" value={String(smoothing())} options={[["auto", "as the rules"], ["1", "none"], ["5", "5 rows"], ["20", "20 rows"], ["100", "100 rows"]]} onChange={(v) => set({ smooth: v === "auto" ? null : v })} />
      {zoom.value ? <button type="button" class="button" onClick={() => zoomTo(null)}>Show everything</button> : <span class="hint">drag over a chart to zoom all of them</span>}
    </div>
  );
}

interface Props {
  page: string;
  opened: Opened;
  without?: (chart: Chart) => boolean;
  children?: ComponentChildren;
}

/** The charts in the catalogue's order. Those that a verdict jumps to are scrolled into view and marked. */
export function ChartGrid({ page, opened, without }: Props): JSX.Element {
  const charts = chartsOf(page, opened).filter((c) => !without?.(c));
  const drawn: JSX.Element[] = [];
  const absent: Chart[] = [];
  for (const chart of charts) {
    const model = modelOf(chart, opened);
    if (model) drawn.push(<ChartCard key={chart.id} model={model} class={param("chart") === chart.id ? "pointed" : ""} height={chart.small ? 150 : 190} />);
    else absent.push(chart);
  }
  const target = param("chart");
  useEffect(() => {
    if (target) document.querySelector(`[data-chart="${CSS.escape(target)}"]`)?.scrollIntoView({ block: "center" });
  }, [target]);
  return (
    <>
      <section class="charts">{drawn}</section>
      <Absent charts={absent} opened={opened} />
    </>
  );
}

export function Absent({ charts, opened, folded }: { charts: Chart[]; opened: Opened; folded?: boolean }): JSX.Element | null {
  if (!charts.length) return null;
  return (
    <details class="absent" open={!folded && charts.length < 4}>
      <summary>{charts.length === 1 ? "One chart is" : `${charts.length} charts are`} not drawn: this run did not record what they need</summary>
      <ul>{charts.map((chart) => <li key={chart.id} data-chart={chart.id} data-state="explained"><b>{chart.title}</b>: {why(chart, opened)}</li>)}</ul>
    </details>
  );
}
