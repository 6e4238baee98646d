// One chart on one canvas: uPlot draws lines, axes and the hover line; bands, marks, stacks and heat maps are painted in its hooks.
import uPlot from "uplot";
import * as format from "../format";
import { clamp, lowerBound } from "../math";
import { zoomTo } from "../route";
import type { Palette } from "../theme";
import type { Line, Model } from "./model";

export interface PlotOptions {
  width: number;
  height: number;
  palette: Palette;
  zoom: [number, number] | null;
  log: boolean;
  small: boolean;
  labels: boolean; // names at the ends of the lines
  hover: (text: string | null) => void;
}

const FONT = '11px Inter, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const BOLD = '600 12.5px Inter, system-ui, -apple-system, "Segoe UI", Roboto, sans-serif';
const LABEL_WIDTH = 124;
export const SYNC = "trimtab";

export const AXIS_NAMES = { step: "step", tokens: "tokens", time: "hours", samples: "samples" } as const;

/** Values of all lines on one list of x, as uPlot wants them. */
function aligned(model: Model): uPlot.AlignedData {
  const lists: (Line["x"])[] = [...model.lines.map((line) => line.x)];
  if (model.stack) lists.push(model.stack.x);
  const first = lists[0] ?? model.heat?.x ?? [];
  if (lists.every((x) => x === first) && first.every((v, i) => v !== null && (i === 0 || v > (first[i - 1] ?? -Infinity)))) {
    const blank = model.stack || !model.lines.length ? [first.map(() => null)] : [];
    return [first, ...blank, ...model.lines.map((line) => line.y)] as uPlot.AlignedData;
  }
  const xs = [...new Set([...lists.flat(), ...(model.heat?.x ?? [])].filter((v): v is number => v !== null))].sort((a, b) => a - b);
  const at = new Map(xs.map((v, i) => [v, i]));
  const spread = (line: Line): (number | null | undefined)[] => {
    const y: (number | null | undefined)[] = new Array(xs.length).fill(undefined);
    line.x.forEach((v, i) => v !== null && (y[at.get(v)!] = line.y[i]));
    return y;
  };
  const blank = model.stack || !model.lines.length ? [xs.map(() => null)] : [];
  return [xs, ...blank, ...model.lines.map(spread)] as uPlot.AlignedData;
}

function extent(model: Model, log: boolean, x: [number, number]): [number, number] {
  let [low, high] = [Infinity, -Infinity];
  const see = (v: number | null | undefined): void => {
    if (v === null || v === undefined || (log && v <= 0)) return;
    if (v < low) low = v;
    if (v > high) high = v;
  };
  for (const line of model.lines) {
    for (let i = 0; i < line.y.length; i++) {
      const at = line.x[i];
      if (at === null || at < x[0] || at > x[1] || line.y[i] === null) continue;
      see(line.y[i]! + (line.error?.[i] ?? 0));
      see(line.y[i]! - (line.error?.[i] ?? 0));
    }
  }
  if (model.stack) {
    see(0);
    const { x: xs, parts } = model.stack;
    for (let i = 0; i < xs.length; i++) {
      if (xs[i] === null || xs[i]! < x[0] || xs[i]! > x[1]) continue;
      see(parts.reduce((sum, part) => sum + (part.y[i] ?? 0), 0));
    }
  }
  if (model.heat) {
    const { edges, counts } = model.heat;
    counts.forEach((row) => row.forEach((c, k) => c && (see(edges[k]), see(edges[k + 1]))));
  }
  if (low > high) return log ? [0.1, 1] : [0, 1];
  // A band's edge comes into view when the values are near it; a far edge would flatten the line.
  const span = Math.max(high - low, Math.abs(high) * 0.05);
  for (const band of model.bands) for (const edge of [band.low, band.high]) if (edge !== null && edge > low - 2 * span && edge < high + 2 * span) see(edge);
  if (model.zero) see(0);
  if (log) return low === high ? [low / 2, high * 2] : [low * 0.9, high * 1.1];
  if (low === high) {
    const pad = Math.abs(low) * 0.1 || 1;
    return [low >= 0 ? Math.max(0, low - pad) : low - pad, high + pad];
  }
  const pad = (high - low) * 0.06;
  const bottom = model.stack || (low >= 0 && low - pad < 0) ? Math.max(0, low === 0 ? 0 : low - pad) : low - pad;
  return [model.stack ? 0 : bottom, model.stack?.share ? 1 : high + pad];
}

export class Plot {
  private plot: uPlot;
  private data: uPlot.AlignedData;
  private offset: number; // of the first line among uPlot's series
  private full: [number, number];

  constructor(box: HTMLElement, private model: Model, private options: PlotOptions) {
    this.data = aligned(model);
    this.offset = this.data.length - model.lines.length;
    const xs = this.data[0];
    const pad = model.stack ? halfBar(xs as number[]) : 0;
    const seen = model.stack || model.heat ? (xs as number[]) : (xs as number[]).filter((_, i) => this.data.slice(1).some((y) => (y as (number | null)[])[i] != null));
    this.full = seen.length ? [seen[0] - pad, seen[seen.length - 1] + pad] : [0, 1];
    if (this.full[0] === this.full[1]) this.full = [this.full[0] - 0.5, this.full[1] + 0.5];
    this.plot = new uPlot(this.configure(), this.data, box);
  }

  destroy(): void {
    this.plot.destroy();
  }

  size(width: number, height: number): void {
    this.plot.setSize({ width, height });
  }

  zoom(range: [number, number] | null): void {
    this.options.zoom = range;
    const [low, high] = range ?? this.full;
    this.plot.setScale("x", { min: low, max: high });
  }

  /** Moves the hover line by rows: the keyboard's way to read a value. */
  move(by: number): void {
    const xs = this.data[0] as number[];
    const [low, high] = this.range();
    const [first, last] = [lowerBound(xs, low), lowerBound(xs, high + 1e-9) - 1];
    const at = clamp((this.plot.cursor.idx ?? (by > 0 ? first - 1 : last + 1)) + by, first, last);
    this.plot.setCursor({ left: this.plot.valToPos(xs[at], "x"), top: 10 }, true);
  }

  private range(): [number, number] {
    return this.options.zoom ?? this.full;
  }

  private configure(): uPlot.Options {
    const { palette: colour, small, width, height, log, labels } = this.options;
    const { model } = this;
    const right = labels ? LABEL_WIDTH : small ? 2 : 20;
    const axis = { stroke: colour.faint, font: FONT, ticks: { show: false }, grid: { stroke: colour.grid, width: 1 } };
    return {
      width,
      height,
      padding: [small ? 4 : 8, right, 0, small ? 2 : 0],
      legend: { show: false },
      pxAlign: 1,
      scales: {
        x: { time: false, range: () => this.range() },
        y: { distr: log ? 3 : 1, range: () => extent(model, log, this.range()) },
      },
      axes: [
        {
          ...axis, size: small ? 18 : 24, gap: small ? 2 : 4, grid: { show: false }, space: small ? 60 : 70,
          values: (_, splits) => splits.map((v) => (small ? "" : this.xText(v))), incrs: model.axis === "step" ? [1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10000, 25000, 50000, 100000] : undefined,
        },
        {
          ...axis, show: !small, space: 34, gap: 6,
          values: (_, splits) => splits.map((v) => (v === null ? "" : this.yText(v))),
          size: (_, values) => 12 + Math.max(14, ...(values ?? []).map((text) => (text?.length ?? 0) * 6.4)),
          filter: log ? (_, splits) => splits.map((v) => (/^1|^5/.test(v.toExponential()) ? v : null)) as number[] : undefined,
        },
      ],
      series: [
        {},
        ...Array.from({ length: this.offset - 1 }, () => ({ show: true, stroke: "transparent", points: { show: false } })),
        ...model.lines.map((line) => this.series(line)),
      ],
      cursor: {
        sync: { key: SYNC, scales: ["x", null], setSeries: false },
        drag: { x: true, y: false, setScale: false, dist: 6 },
        points: { size: 6, width: 0, fill: (u, i) => (i >= this.offset ? colour[model.lines[i - this.offset].colour] : "transparent"), show: (_, i) => this.pointElement(i) },
        y: false,
        bind: { dblclick: () => () => (zoomTo(null), null) },
      },
      hooks: {
        drawClear: [(u) => this.paintBands(u)],
        drawSeries: [],
        draw: [(u) => this.paintOver(u)],
        drawAxes: [(u) => (this.paintHeat(u), this.paintStack(u), this.paintSpread(u))],
        setCursor: [(u) => this.options.hover(this.readout(u.cursor.idx ?? null, u))],
        setSelect: [
          (u) => {
            if (u.select.width < 6) return;
            zoomTo([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
            u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
          },
        ],
      },
    };
  }

  private pointElement(i: number): HTMLElement {
    const element = document.createElement("div");
    element.hidden = i < this.offset || !!this.model.lines[i - this.offset]?.faint;
    return element;
  }

  private series(line: Line): uPlot.Series {
    const { palette, small } = this.options;
    const few = line.y.filter((v) => v !== null).length < 5;
    return {
      stroke: line.faint ? withAlpha(palette[line.colour], 0.3) : palette[line.colour],
      width: small && !line.faint ? Math.min(line.width, 1.8) : line.width,
      dash: line.dash,
      cap: line.dash && line.dash[0] <= 1.5 ? "round" : "butt",
      spanGaps: !!line.joined,
      points: { show: line.dots || few ? true : undefined, size: small ? 5 : 8, width: small ? 0.01 : 1.5, stroke: palette.card, fill: palette[line.colour], space: 0, filter: line.dots || few ? undefined : lonely },
    };
  }

  private xText(v: number): string {
    if (v === null || v === undefined) return "";
    if (this.model.axis === "time") return `${format.tick(v)} h`;
    return this.model.axis === "step" ? (Number.isInteger(v) ? String(v) : "") : format.tick(v);
  }

  private yText(v: number): string {
    if (format.isShare(this.model.unit) || this.model.stack?.share) return v === 0 ? "0" : format.percent(v, Math.abs(v) < 0.0095 ? 2 : Math.abs(v * 100 - Math.round(v * 100)) > 1e-6 ? 1 : 0);
    return format.tick(v);
  }

  /** What the hover line is on: the row and every value of it. */
  private readout(idx: number | null, u: uPlot): string | null {
    if (idx === null || !this.plot) return null;
    const { model } = this;
    const x = u.data[0][idx];
    if (x === undefined) return null;
    const parts: string[] = [];
    model.lines.forEach((line, k) => {
      const v = (u.data[k + this.offset] as (number | null | undefined)[])[idx];
      if (v === null || v === undefined) return;
      const twin = model.lines.some((other) => other !== line && other.metric === line.metric);
      const name = twin ? (line.faint ? "raw" : model.lines.filter((l) => !l.faint).length > 1 ? line.label : "smoothed") : model.lines.length > 1 ? line.label : "";
      const error = line.error?.[idx];
      const unit = format.unitOf(line.metric, model.unit);
      parts.push(`${name} ${format.value(v, unit)}${error ? ` \u00b1${format.value(error, unit)}` : ""}`.trim());
    });
    if (model.stack) {
      const at = model.stack.x.indexOf(x as number);
      if (at >= 0) for (const part of model.stack.parts) if (part.y[at]) parts.push(`${part.name} ${model.stack.share ? format.percent(part.y[at]) : format.value(part.y[at], model.unit ?? "s")}`);
    }
    const near = model.marks.find((mark) => mark.x === x && mark.kind === "bad");
    if (near) parts.push("not finite");
    const where = model.axis === "step" ? `step ${format.number(x as number, 6)}` : `${format.number(x as number, 4)} ${AXIS_NAMES[model.axis]}`;
    return [where, ...parts].join("  \u00b7  ");
  }

  private paintBands(u: uPlot): void {
    const { ctx, bbox } = u;
    const { palette } = this.options;
    ctx.save();
    clip(u);
    for (const band of this.model.bands) {
      const [x1, x2] = [u.valToPos(band.from, "x", true), u.valToPos(band.to, "x", true)];
      const top = band.high === null ? bbox.top : u.valToPos(band.high, "y", true);
      const bottom = band.low === null ? bbox.top + bbox.height : u.valToPos(band.low, "y", true);
      ctx.fillStyle = palette.band;
      ctx.fillRect(x1, top, x2 - x1, bottom - top);
      ctx.strokeStyle = palette.bandline;
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([2 * devicePixelRatio, 3 * devicePixelRatio]);
      for (const [edge, y] of [[band.high, top], [band.low, bottom]] as const) if (edge !== null) stroke(ctx, x1, y, x2, y);
    }
    ctx.restore();
  }

  private paintStack(u: uPlot): void {
    const { stack } = this.model;
    if (!stack) return;
    const { ctx } = u;
    ctx.save();
    clip(u);
    for (const bar of columnsOf(u, stack.x, !stack.share)) {
      let base = 0;
      for (const part of stack.parts) {
        let sum = 0;
        let rows = 0;
        for (const i of bar.rows) if (part.y[i] !== null && part.y[i] !== undefined) (sum += part.y[i]!), rows++;
        if (!rows) continue;
        const mean = sum / (stack.share ? rows : bar.rows.length);
        const [y1, y2] = [u.valToPos(base + mean, "y", true), u.valToPos(base, "y", true)];
        ctx.fillStyle = this.options.palette[part.colour];
        ctx.fillRect(bar.left, y1, bar.width, y2 - y1);
        base += mean;
      }
      if (bar.rows.length > 1 && !stack.share) {
        // Many steps in one bar: it shows their mean, and a tick the slowest of them.
        const most = Math.max(...bar.rows.map((i) => stack.parts.reduce((s, part) => s + (part.y[i] ?? 0), 0)));
        if (most < base * 1.15) continue;
        ctx.fillStyle = this.options.palette.mut;
        ctx.fillRect(bar.left, u.valToPos(most, "y", true), bar.width, devicePixelRatio);
      }
    }
    ctx.restore();
  }

  private paintSpread(u: uPlot): void {
    const { spread } = this.model;
    if (!spread) return;
    const { ctx } = u;
    ctx.save();
    clip(u);
    ctx.beginPath();
    spread.x.forEach((v, i) => ctx.lineTo(u.valToPos(v, "x", true), u.valToPos(spread.high[i], "y", true)));
    for (let i = spread.x.length - 1; i >= 0; i--) ctx.lineTo(u.valToPos(spread.x[i], "x", true), u.valToPos(spread.low[i], "y", true));
    ctx.closePath();
    ctx.fillStyle = withAlpha(this.options.palette[spread.colour], 0.15);
    ctx.fill();
    ctx.restore();
  }

  private paintHeat(u: uPlot): void {
    const { heat } = this.model;
    if (!heat) return;
    const { ctx } = u;
    const most = Math.max(1, ...heat.counts.flat());
    ctx.save();
    clip(u);
    for (const column of columnsOf(u, heat.x, false)) {
      for (let k = 0; k + 1 < heat.edges.length; k++) {
        let total = 0;
        for (const i of column.rows) total += heat.counts[i]?.[k] ?? 0;
        if (!total) continue;
        const share = total / column.rows.length / most;
        const low = this.options.log ? Math.max(heat.edges[k], 1e-9) : heat.edges[k];
        const [y1, y2] = [u.valToPos(heat.edges[k + 1], "y", true), u.valToPos(low, "y", true)];
        ctx.fillStyle = withAlpha(this.options.palette.heat, 0.08 + 0.72 * Math.sqrt(share));
        ctx.fillRect(column.left, y1, column.width + 0.5, Math.max(1, y2 - y1));
      }
    }
    ctx.restore();
  }

  private paintOver(u: uPlot): void {
    const { ctx, bbox } = u;
    const { palette, small } = this.options;
    const dpr = devicePixelRatio;
    ctx.save();
    clip(u);
    this.model.lines.forEach((line, k) => {
      if (!line.error || small) return;
      ctx.strokeStyle = withAlpha(palette[line.colour], 0.55);
      ctx.lineWidth = 1.4 * dpr;
      line.error.forEach((error, i) => {
        const [x, y] = [line.x[i], line.y[i]];
        if (x === null || y === null || error === null || k < 0) return;
        const at = u.valToPos(x, "x", true);
        stroke(ctx, at, u.valToPos(y - error, "y", true), at, u.valToPos(y + error, "y", true));
      });
    });
    ctx.restore();
    ctx.save();
    for (const mark of this.model.marks) {
      const at = Math.round(u.valToPos(mark.x, "x", true));
      if (at < bbox.left - 1 || at > bbox.left + bbox.width + 1) continue;
      if (mark.kind === "bad") {
        ctx.fillStyle = palette.bad;
        ctx.fillRect(at - dpr, bbox.top + bbox.height - 7 * dpr, 2 * dpr, 9 * dpr);
      } else {
        ctx.strokeStyle = mark.kind === "best" ? palette.eval : palette.mut;
        ctx.lineWidth = dpr;
        ctx.setLineDash(mark.kind === "best" ? [2 * dpr, 3 * dpr] : []);
        ctx.globalAlpha = mark.kind === "best" ? 0.6 : 0.7;
        stroke(ctx, at + 0.5, bbox.top, at + 0.5, bbox.top + bbox.height);
        ctx.globalAlpha = 1;
      }
      if (mark.kind === "best" && !small) {
        ctx.font = scaled(FONT);
        ctx.fillStyle = palette.mut;
        const left = at > bbox.left + bbox.width / 2;
        ctx.textAlign = left ? "right" : "left";
        ctx.fillText(mark.text, at + (left ? -8 : 8) * dpr, bbox.top + bbox.height - 10 * dpr);
      }
    }
    ctx.restore();
    if (small) this.paintEnds(u);
    if (this.options.labels) this.paintLabels(u);
    if (!small) this.paintAxisName(u);
  }

  /** A small chart has no room for an axis: its line and the two ends. */
  private paintEnds({ ctx, bbox }: uPlot): void {
    const dpr = devicePixelRatio;
    const bottom = bbox.top + bbox.height;
    ctx.save();
    ctx.fillStyle = this.options.palette.line;
    ctx.fillRect(bbox.left, bottom, bbox.width, dpr);
    ctx.fillStyle = this.options.palette.faint;
    ctx.font = scaled(FONT);
    ctx.textBaseline = "top";
    const [low, high] = this.range().map((v) => (this.model.axis === "step" ? Math.round(v) : v));
    const only = (this.data[0] as number[]).filter((v) => v >= this.range()[0] && v <= this.range()[1]);
    // One row has no two ends.
    (only.length === 1 ? [only[0]] : [low, high]).forEach((v, k, all) => {
      ctx.textAlign = all.length === 1 ? "center" : k ? "right" : "left";
      ctx.fillText(this.xText(v), bbox.left + (all.length === 1 ? 0.5 : k) * bbox.width, bottom + 4 * dpr);
    });
    ctx.restore();
  }

  private paintAxisName(u: uPlot): void {
    const { ctx, bbox } = u;
    if (!this.options.labels) return;
    ctx.save();
    ctx.font = scaled(FONT);
    ctx.fillStyle = this.options.palette.faint;
    ctx.textAlign = "left";
    ctx.textBaseline = "top";
    ctx.fillText(AXIS_NAMES[this.model.axis], bbox.left + bbox.width + 24 * devicePixelRatio, bbox.top + bbox.height + 5 * devicePixelRatio);
    ctx.restore();
  }

  /** Names at the ends of the lines, pushed apart so that none covers another. */
  private paintLabels(u: uPlot): void {
    const { ctx, bbox } = u;
    const { palette } = this.options;
    const dpr = devicePixelRatio;
    const labels = this.model.lines
      .filter((line) => !line.faint)
      .flatMap((line) => {
        const last = lastIn(line, this.range());
        if (last === null) return [];
        const twin = this.model.lines.some((other) => other.faint && other.metric === line.metric);
        const error = line.error?.[last];
        const unit = format.unitOf(line.metric, this.model.unit);
        const sub = line.error ? `held out${error ? "; bars: 95 %" : ""}` : twin ? (line.label === "training" ? "smoothed" : "training, smoothed") : "";
        return [{ text: `${sub ? line.label.replace(/, (held out|smoothed)$/, "") : line.label} ${format.isShare(unit) ? format.percent(line.y[last], 1) : format.value(line.y[last], unit)}`, sub, colour: palette[line.colour], y: u.valToPos(line.y[last]!, "y", true) }];
      })
      .sort((a, b) => a.y - b.y);
    const need = (sub: string): number => (sub ? 34 : 20) * dpr;
    for (let k = 1; k < labels.length; k++) labels[k].y = Math.max(labels[k].y, labels[k - 1].y + need(labels[k - 1].sub));
    let limit = bbox.top + bbox.height - 12 * dpr;
    for (let k = labels.length - 1; k >= 0; k--) {
      labels[k].y = Math.min(labels[k].y, limit);
      limit = labels[k].y - need(labels[k - 1]?.sub ?? "");
    }
    ctx.save();
    ctx.textAlign = "left";
    ctx.textBaseline = "middle";
    const x = bbox.left + bbox.width + 12 * dpr;
    for (const label of labels) {
      ctx.font = scaled(BOLD);
      ctx.fillStyle = label.colour;
      ctx.fillText(label.text, x, label.y, (LABEL_WIDTH - 14) * dpr);
      ctx.font = scaled(FONT);
      ctx.fillStyle = palette.faint;
      if (label.sub) ctx.fillText(label.sub, x, label.y + 14 * dpr, (LABEL_WIDTH - 14) * dpr);
    }
    ctx.restore();
  }
}

function lastIn(line: Line, range: [number, number]): number | null {
  for (let i = line.y.length - 1; i >= 0; i--) if (line.y[i] !== null && line.x[i] !== null && line.x[i]! <= range[1]) return line.x[i]! < range[0] ? null : i;
  return null;
}

/** A value between two gaps has no line: it is shown as a point. */
const lonely: uPlot.Series.Points.Filter = (u, i) => {
  const y = u.data[i] as (number | null | undefined)[];
  const found: number[] = [];
  for (let k = 0; k < y.length && found.length < 200; k++) if (y[k] != null && y[k - 1] == null && y[k + 1] == null) found.push(k);
  return found;
};

const halfBar = (xs: number[]): number => (xs.length > 1 ? (xs[xs.length - 1] - xs[0]) / (xs.length - 1) / 2 : 0.5);

/** Bars at least three pixels wide: with more steps than that, several share one. */
function columnsOf(u: uPlot, xs: (number | null)[], gaps: boolean): { left: number; width: number; rows: number[] }[] {
  const [low, high] = [u.scales.x.min!, u.scales.x.max!];
  const seen: number[] = [];
  xs.forEach((v, i) => v !== null && v >= low && v <= high && seen.push(i));
  if (!seen.length) return [];
  const dpr = devicePixelRatio;
  const most = Math.max(1, Math.floor(u.bbox.width / (3 * dpr)));
  const each = Math.ceil(seen.length / most);
  const result = [];
  for (let k = 0; k < seen.length; k += each) {
    const rows = seen.slice(k, k + each);
    const [first, last] = [xs[rows[0]]!, xs[rows[rows.length - 1]]!];
    const before = k ? xs[seen[k - 1]]! : null;
    const after = k + each < seen.length ? xs[seen[k + each]]! : null;
    const half = halfBar(seen.map((i) => xs[i]!));
    const left = u.valToPos(before === null ? first - half : (before + first) / 2, "x", true);
    const right = u.valToPos(after === null ? last + half : (last + after) / 2, "x", true);
    const gap = gaps && right - left > 4 * dpr ? dpr * 0.75 : 0;
    result.push({ left, width: Math.max(1, right - left - gap), rows });
  }
  return result;
}

function clip(u: uPlot): void {
  u.ctx.beginPath();
  u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
  u.ctx.clip();
}

function stroke(ctx: CanvasRenderingContext2D, x1: number, y1: number, x2: number, y2: number): void {
  ctx.beginPath();
  ctx.moveTo(x1, y1);
  ctx.lineTo(x2, y2);
  ctx.stroke();
}

const scaled = (font: string): string => font.replace(/([\d.]+)px/, (_, size) => `${Number(size) * devicePixelRatio}px`);

export function withAlpha(colour: string, alpha: number): string {
  const hex = colour.replace("#", "");
  const full = hex.length === 3 ? [...hex].map((c) => c + c).join("") : hex;
  const [r, g, b] = [0, 2, 4].map((i) => parseInt(full.slice(i, i + 2), 16));
  return `rgba(${r}, ${g}, ${b}, ${alpha})`;
}
