// The timeline: one canvas, zoomed by wheel or keys, moved by dragging; lists of slow steps and idle gaps that jump there.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useLayoutEffect, useMemo, useRef } from "preact/hooks";
import { here } from "../chart/card";
import type { Trace } from "../data";
import * as format from "../format";
import { clamp } from "../math";
import { param, set } from "../route";
import { live } from "../store";
import { palette } from "../theme";
import { Card, Empty, useWidth } from "../ui";
import { draw, heightOf, LEFT, laneTops, ROW } from "./draw";
import { extent, gapsOf, lanesOf, spanAt, stepsOf, trackName } from "./spans";

export function TimelinePage(): JSX.Element {
  const run = here().run.value;
  if (!run.trace) {
    const told = run.missing.find((m) => /trace|timeline/.test(m.what))?.text;
    return <section class="card page-card"><Empty title="No timeline">{told ?? "The folder has no trace.json, or nothing in it can be read."}</Empty></section>;
  }
  return <Timeline trace={run.trace} />;
}

function Timeline({ trace }: { trace: Trace }): JSX.Element {
  const lanes = useMemo(() => lanesOf(trace), [trace]);
  const gaps = useMemo(() => gapsOf(trace, lanes), [trace]);
  const steps = useMemo(() => stepsOf(trace), [trace]);
  const whole = useMemo(() => extent(trace), [trace]);
  const [box, width] = useWidth<HTMLDivElement>();
  const canvas = useRef<HTMLCanvasElement>(null);
  const chosen = useSignal<number | null>(null);
  const asked = (param("at") ?? "").split(",").map((v) => Number(v) * 1e6 + whole[0]);
  const view = useRef<[number, number]>(asked.length === 2 && asked[1] > asked[0] ? [asked[0], asked[1]] : firstView(trace, steps, whole));
  const colours = palette.value;
  const height = heightOf(lanes, Object.keys(trace.counters).length);
  const frame = useRef(0);
  const saved = useRef(0);

  const paint = (): void => {
    frame.current = 0;
    const element = canvas.current;
    if (!element || !width) return;
    const ratio = devicePixelRatio;
    if (element.width !== Math.round(width * ratio)) (element.width = Math.round(width * ratio)), (element.height = Math.round(height * ratio));
    const ctx = element.getContext("2d")!;
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    const began = performance.now();
    const painted = draw(ctx, trace, lanes, gaps, { from: view.current[0], to: view.current[1], width, zero: whole[0] }, colours, chosen.value);
    element.dataset.painted = String(painted);
    element.dataset.ms = (performance.now() - began).toFixed(1);
  };
  const later = (): void => void (frame.current ||= requestAnimationFrame(paint));

  const show = (from: number, to: number): void => {
    const span = clamp(to - from, 10, whole[1] - whole[0]);
    const start = clamp(from, whole[0], whole[1] - span);
    view.current = [start, start + span];
    later();
    clearTimeout(saved.current);
    saved.current = window.setTimeout(() => set({ at: view.current.map((t) => ((t - whole[0]) / 1e6).toFixed(4)).join(",") }), 250);
  };
  const zoomBy = (factor: number, at: number): void => {
    const [from, to] = view.current;
    show(at - (at - from) * factor, at + (to - at) * factor);
  };
  const timeAt = (x: number): number => view.current[0] + ((x - LEFT) / (width - LEFT)) * (view.current[1] - view.current[0]);

  useLayoutEffect(paint, [width, colours, trace, chosen.value]);
  useEffect(() => {
    const element = canvas.current!;
    const wheel = (e: WheelEvent): void => {
      if (!e.ctrlKey && !e.shiftKey && Math.abs(e.deltaX) > Math.abs(e.deltaY)) return;
      e.preventDefault();
      if (e.shiftKey) {
        const by = ((view.current[1] - view.current[0]) * (e.deltaY || e.deltaX)) / 800;
        show(view.current[0] + by, view.current[1] + by);
      } else zoomBy(Math.exp(clamp(e.deltaY, -200, 200) / 300), timeAt(e.offsetX));
    };
    element.addEventListener("wheel", wheel, { passive: false });
    return () => element.removeEventListener("wheel", wheel);
  });

  const drag = useRef<{ x: number; from: number; moved: boolean } | null>(null);
  const down = (e: PointerEvent): void => {
    drag.current = { x: e.offsetX, from: view.current[0], moved: false };
    canvas.current!.setPointerCapture(e.pointerId);
  };
  const move = (e: PointerEvent): void => {
    if (!drag.current) return;
    const by = ((e.offsetX - drag.current.x) / (width - LEFT)) * (view.current[1] - view.current[0]);
    if (Math.abs(e.offsetX - drag.current.x) > 3) drag.current.moved = true;
    if (drag.current.moved) show(drag.current.from - by, drag.current.from - by + view.current[1] - view.current[0]);
  };
  const up = (e: PointerEvent): void => {
    const moved = drag.current?.moved;
    drag.current = null;
    if (moved) return;
    const tops = laneTops(lanes);
    const n = tops.findLastIndex((top) => e.offsetY >= top);
    chosen.value = n < 0 ? null : spanAt(lanes[n], timeAt(e.offsetX), Math.min(Math.floor((e.offsetY - tops[n]) / ROW), lanes[n].depth - 1));
  };
  const key = (e: KeyboardEvent): void => {
    const [from, to] = view.current;
    const span = to - from;
    const acts: Record<string, () => void> = {
      ArrowLeft: () => show(from - span / 8, to - span / 8), ArrowRight: () => show(from + span / 8, to + span / 8), "+": () => zoomBy(0.7, from + span / 2), "=": () => zoomBy(0.7, from + span / 2), "-": () => zoomBy(1.4, from + span / 2), "0": () => show(...whole), Escape: () => (chosen.value = null),
    };
    if (acts[e.key]) acts[e.key](), e.preventDefault();
  };
  const middle = (): number => (view.current[0] + view.current[1]) / 2;
  const jump = (start: number, end: number): void => show(start - (end - start) * 0.15, end + (end - start) * 0.15);
  const slow = [...steps].sort((a, b) => b.end - b.start - (a.end - a.start)).slice(0, 8);

  return (
    <>
      <div class="toolbar">
        <button type="button" class="button" aria-label="zoom in" onClick={() => zoomBy(0.5, middle())}>+</button>
        <button type="button" class="button" aria-label="zoom out" onClick={() => zoomBy(2, middle())}>{"\u2212"}</button>
        <button type="button" class="button" onClick={() => show(...whole)}>Whole run</button>
        <span class="hint">wheel zooms, dragging moves, a click shows what a span is</span>
        <span class="grow" />
        <span>{format.plural(trace.spans.length, "span")}{trace.left_out ? `, ${format.count(trace.left_out)} left out` : ""}</span>
        <Perfetto trace={trace} />
      </div>
      <section class="card timeline" ref={box}>
        <canvas ref={canvas} style={{ width: "100%", height: `${height}px` }} tabIndex={0} role="img" aria-label={`Timeline of ${trace.spans.length} spans in ${lanes.map((l) => l.name).join(", ")}. Arrow keys move, plus and minus zoom.`} onPointerDown={down} onPointerMove={move} onPointerUp={up} onDblClick={() => show(...whole)} onKeyDown={key} />
      </section>
      {chosen.value !== null && <SpanCard trace={trace} index={chosen.value} zero={whole[0]} jump={jump} />}
      <section class="charts">
        <Card title="Slowest steps"><table class="list"><thead><tr><th>step</th><th class="num">time</th><th class="num">of the median</th></tr></thead><tbody>
          {slow.map((s) => <tr key={s.step}><td><button type="button" class="link" onClick={() => jump(s.start, s.end)}>step {s.step}</button></td><td class="num">{format.microseconds(s.end - s.start)}</td><td class="num">{format.number(s.times, 2)} {"\u00d7"}</td></tr>)}
        </tbody></table></Card>
        <Card title="Idle gaps" sub="no phase runs">{gaps.length ? <table class="list"><thead><tr><th>between</th><th>step</th><th class="num">time</th></tr></thead><tbody>
          {gaps.slice(0, 8).map((g, k) => <tr key={k}><td><button type="button" class="link" onClick={() => jump(g.start, g.end)}>{g.after} and {g.before}</button></td><td>{g.step ?? format.DASH}</td><td class="num">{format.microseconds(g.end - g.start)}</td></tr>)}
        </tbody></table> : <Empty title="None">The phases follow each other without a pause.</Empty>}</Card>
      </section>
    </>
  );
}

/** A few steps, the last that were recorded in detail: a whole run of hours shows nothing. */
function firstView(trace: Trace, steps: { step: number; start: number; end: number }[], whole: [number, number]): [number, number] {
  const detailed = new Set(trace.spans.filter((s) => s[4] !== null && !["phases", "events", "checkpoints"].includes(trackName(trace, s[0]))).map((s) => s[4]));
  const sorted = [...steps].sort((a, b) => a.step - b.step);
  const at = sorted.findLastIndex((s) => detailed.has(s.step));
  const last = at < 0 ? sorted.slice(-3) : sorted.slice(Math.max(0, at - 1), at + 2);
  return last.length > 1 ? [last[0].start, last[last.length - 1].end] : whole;
}

function SpanCard({ trace, index, zero, jump }: { trace: Trace; index: number; zero: number; jump: (a: number, b: number) => void }): JSX.Element {
  const [track, name, start, duration, step, args] = trace.spans[index];
  const facts: [string, string][] = [["track", trackName(trace, track)], ["begins", format.microseconds(start - zero)], ["takes", format.microseconds(duration)], ...(step !== null && step !== undefined ? [["step", String(step)] as [string, string]] : []), ...Object.entries(args ?? {}).map(([k, v]): [string, string] => [k, format.json(v)])];
  return (
    <section class="card span-card" aria-live="polite">
      <div class="card-head"><h3>{name}</h3><span class="readout" /><button type="button" class="button" onClick={() => jump(start, start + duration)}>Zoom to it</button></div>
      <dl class="sample-facts">{facts.map(([k, v]) => <div key={k}><dt>{k}</dt><dd>{v}</dd></div>)}</dl>
    </section>
  );
}

/** The server's page may name the viewer's address; nothing is loaded before the click. A report names the file. */
function Perfetto({ trace }: { trace: Trace }): JSX.Element {
  const address = document.querySelector<HTMLMetaElement>('meta[name="perfetto"]')?.content;
  if (!live.value || !address) return <span class="hint">{trace.file ?? "trace.json"} opens in Perfetto</span>;
  const open = async (): Promise<void> => {
    const target = window.open(address);
    const id = encodeURIComponent(here().run.value.id);
    const buffer = await (await fetch(`/api/runs/${id}/trace?raw=1`)).arrayBuffer();
    const origin = new URL(address).origin;
    const ping = setInterval(() => target?.postMessage("PING", origin), 200);
    const ready = (e: MessageEvent): void => {
      if (e.origin !== origin || e.data !== "PONG") return;
      clearInterval(ping);
      removeEventListener("message", ready);
      target?.postMessage({ perfetto: { buffer, title: here().run.value.name } }, origin);
    };
    addEventListener("message", ready);
    setTimeout(() => clearInterval(ping), 20000);
  };
  return <button type="button" class="button" title={`opens ${address} in a new tab and hands the trace over to it`} onClick={() => void open()}>Open in Perfetto</button>;
}
