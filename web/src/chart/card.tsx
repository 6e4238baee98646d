// A chart with its title, what the hover line reads, its tools and its note.
import { signal, useSignal } from "@preact/signals";
import type { ComponentChildren, JSX } from "preact";
import { useLayoutEffect, useRef } from "preact/hooks";
import type { Chart } from "../data";
import * as format from "../format";
import { axis, param, zoom } from "../route";
import { current, type Opened } from "../store";
import { palette } from "../theme";
import { Menu, useSeen, useWidth, VirtualList } from "../ui";
import { columns, csv, download, svg } from "./export";
import { build, type Model, type Smoothing } from "./model";
import { Plot } from "./plot";

export const smoothing = (): Smoothing => {
  const chosen = param("smooth");
  return chosen && chosen !== "auto" ? Number(chosen) || 1 : "auto";
};

/** Says in one sentence what a chart shows, for those who cannot see it. */
function spoken(model: Model): string {
  const parts = model.lines.filter((l) => !l.faint).map((line) => {
    const y = line.y.filter((v): v is number => v !== null);
    const unit = format.unitOf(line.metric, model.unit);
    return `${line.label} from ${format.value(y[0], unit)} to ${format.value(y.at(-1), unit)}`;
  });
  if (model.stack) parts.push(`stack of ${model.stack.parts.map((p) => p.name).join(", ")}`);
  return `${model.title}, by ${model.axis}: ${parts.join("; ")}`;
}

interface ViewProps {
  model: Model;
  height: number;
  small?: boolean;
  labels?: boolean;
  log?: boolean;
  hover?: (text: string | null) => void;
}

/** The canvas. Made anew when the model, the colours or the scale change; zoom and width change it in place. */
export function ChartView({ model, height, small, labels, log, hover }: ViewProps): JSX.Element {
  const [box, width] = useWidth<HTMLDivElement>();
  const plot = useRef<Plot | null>(null);
  const colours = palette.value;
  const range = zoom.value;
  const ready = width > 0;
  useLayoutEffect(() => {
    if (!ready) return;
    const named = !!labels && width >= 520 && model.lines.filter((l) => !l.faint).length <= 8;
    plot.current = new Plot(box.current!, model, {
      width, height, palette: colours, zoom: range, log: !!log, small: !!small, labels: named, hover: hover ?? (() => {}),
    });
    return () => (plot.current?.destroy(), (plot.current = null));
  }, [model, colours, log, ready, height, width >= 520]);
  useLayoutEffect(() => plot.current?.size(width, height), [width]);
  useLayoutEffect(() => plot.current?.zoom(range), [range?.[0], range?.[1]]);
  const key = (e: KeyboardEvent): void => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[e.key];
    if (!by) return;
    plot.current?.move(by);
    e.preventDefault();
  };
  return <div class="plot" ref={box} style={{ height: `${height}px` }} role="img" tabIndex={0} aria-label={spoken(model)} onKeyDown={key} />;
}

function DataTable({ model }: { model: Model }): JSX.Element {
  const { head, rows } = columns(model);
  const cell = (v: number | null, k: number): string => (k === 0 ? format.number(v, 6) : format.value(v, model.unit));
  const grid = { gridTemplateColumns: `80px repeat(${head.length - 1}, minmax(84px, 1fr))` };
  return (
    <div class="data-table">
      <div class="data-row head" style={grid}>{head.map((h) => <span title={h}>{h}</span>)}</div>
      <VirtualList count={rows.length} row={22} height={220} label={`${model.title} as a table`} render={(i) => (
        <div class="data-row" key={i} style={grid}>{rows[i].map((v, k) => <span>{cell(v, k)}</span>)}</div>
      )} />
    </div>
  );
}

export function Legend({ model, narrow }: { model: Model; narrow?: boolean }): JSX.Element | null {
  const names = [...model.lines.filter((l) => !l.faint).map((l) => ({ name: l.label, colour: l.colour, dash: !!l.dash })), ...(model.stack?.parts.map((p) => ({ name: p.name, colour: p.colour, dash: false })) ?? [])];
  if (names.length < 2 && !model.stack) return null;
  return (
    <ul class={`legend ${narrow ? "narrow" : ""}`}>
      {names.map((n) => (
        <li><i class={`swatch c-${n.colour} ${model.stack ? "" : n.dash ? "dashed" : "line"}`} />{n.name}</li>
      ))}
    </ul>
  );
}

interface CardProps {
  model: Model;
  height?: number;
  labels?: boolean;
  class?: string;
  sub?: ComponentChildren;
  title?: string;
  children?: ComponentChildren;
}

export function ChartCard({ model, height = 190, labels, sub, title, children, ...rest }: CardProps): JSX.Element {
  const [ref, seen] = useSeen<HTMLElement>();
  return (
    <article class={`card chart ${rest.class ?? ""}`} ref={ref} data-chart={model.id} data-state={seen ? "drawn" : "waiting"}>
      <ChartBody {...{ model, height, labels, sub, seen, title }} />
      {children}
    </article>
  );
}

function ChartBody({ model, height, labels, sub, seen, title }: { model: Model; height: number; labels?: boolean; sub?: ComponentChildren; seen: boolean; title?: string }): JSX.Element {
  const log = useSignal(model.log);
  const table = useSignal(false);
  const readout = useRef<HTMLSpanElement>(null);
  // Written past Preact: the hover line moves over all charts of a page at once, many times a second.
  const hover = (text: string | null): void => {
    if (readout.current) readout.current.textContent = text ?? "";
  };
  const unit = format.unitText(model.unit);
  return (
    <>
      <div class="card-head">
        <h3 title={title}>{model.title} <span>{sub ?? unit}</span></h3>
        <span class="readout" ref={readout} />
        <ChartMenu model={model} log={log} table={table} />
      </div>
      <Legend model={model} narrow={labels} />
      {seen ? table.value ? <DataTable model={model} /> : <ChartView {...{ model, height, labels, hover }} log={log.value} /> : <div style={{ height: `${height}px` }} />}
      {(model.note || model.bandText) && <p class="note">{[model.note, model.bandText && `healthy: ${model.bandText}`].filter(Boolean).join(". ")}</p>}
    </>
  );
}

export function ChartMenu({ model, log, table }: { model: Model; log: { value: boolean }; table: { value: boolean } }): JSX.Element {
  const file = model.id.replace(/[^\w-]+/g, "-");
  return (
    <Menu label={`Tools: ${model.title}`}>
      {!model.stack && <button type="button" aria-pressed={log.value} onClick={() => (log.value = !log.value)}>{log.value ? "Linear scale" : "Log scale"}</button>}
      <button type="button" aria-pressed={table.value} onClick={() => (table.value = !table.value)}>{table.value ? "As a chart" : "As a table"}</button>
      <button type="button" onClick={() => download(`${file}.csv`, "text/csv", csv(model))}>Download CSV</button>
      <button type="button" onClick={() => download(`${file}.svg`, "image/svg+xml", svg(model, palette.value, log.value, zoom.value))}>Download SVG</button>
    </Menu>
  );
}

/** The model of a catalogue chart for the run that is open; null where the run did not record it. */
export function modelOf(chart: Chart, opened: Opened): Model | null {
  const made = { run: opened.run.value, tick: opened.tick.value, axis: axis.value, smoothing: smoothing() };
  let models = kept.get(opened);
  if (!models) kept.set(opened, (models = new Map()));
  const known = models.get(chart.id);
  if (known && known.run === made.run && known.tick === made.tick && known.axis === made.axis && known.smoothing === made.smoothing) return known.model;
  const model = build(chart, made.run, opened.table, made.axis, made.smoothing);
  models.set(chart.id, { ...made, model });
  return model;
}

/** A page is drawn again with every change of the address; its charts only when their numbers change. */
const kept = new WeakMap<Opened, Map<string, { run: unknown; tick: number; axis: string; smoothing: Smoothing; model: Model | null }>>();

export const why = (chart: Chart, opened: Opened): string => {
  const names = chart.metrics.map((m) => m.name ?? `${m.prefix}\u2026`).slice(0, 4).join(", ");
  const told = opened.run.value.missing.find((m) => names.includes(m.what) || chart.id.includes(m.what));
  if (told) return told.text;
  if (axis.value !== "step" && build(chart, opened.run.value, opened.table, "step", 1)) return `the run has no ${axis.value} for its rows: choose the axis "step"`;
  return opened.table.steps.length ? `this run did not record ${names}` : "no step yet";
};

/** Which run a page's charts belong to; pages are only drawn when there is one. */
export const here = (): Opened => current.value!;
export const helpOpen = signal(false);
