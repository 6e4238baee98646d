// All metrics: every name that the run wrote, as it is, drawn as it comes into view.
import type { JSX } from "preact";
import { ChartCard, here, modelOf } from "../chart/card";
import type { Chart } from "../data";
import { param, set } from "../route";
import { catalogue } from "../store";
import { Empty } from "../ui";
import { ChartTools } from "./charts";

/** The unit is that of the first catalogue chart with this metric; a metric that no chart knows has none. */
function chartFor(name: string): Chart {
  const known = catalogue.value.find((c) => c.kind === "lines" && c.metrics.some((m) => m.name === name));
  return { id: `metric:${name}`, title: name, page: "learning", metrics: [{ name, label: name }], unit: known?.unit ?? null, kind: "lines" };
}

export function AllMetrics(): JSX.Element {
  const opened = here();
  opened.tick.value;
  const q = (param("m") ?? "").toLowerCase();
  const names = opened.table.names();
  const shown = names.filter((name) => name.toLowerCase().includes(q));
  return (
    <>
      <div class="toolbar">
        <input type="search" placeholder="search metrics" aria-label="search metrics" value={param("m") ?? ""} onInput={(e) => set({ m: e.currentTarget.value || null })} />
        <span>{shown.length} of {names.length} metrics</span>
      </div>
      <ChartTools opened={[opened]} />
      {shown.length ? (
        <section class="charts many">{shown.map((name) => { const model = modelOf(chartFor(name), opened); return model ? <ChartCard key={name} model={model} height={110} /> : <article key={name} class="card chart"><div class="card-head"><h3>{name}</h3></div><Empty title="no finite value" /></article>; })}</section>
      ) : <Empty title="No metric">{names.length ? "None has that in its name." : "No step yet."}</Empty>}
    </>
  );
}
