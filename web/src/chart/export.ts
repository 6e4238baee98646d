// A chart as CSV and as SVG, made from the same model as the drawing.
import * as format from "../format";
import { ticks } from "../math";
import type { Palette } from "../theme";
import type { Line, Model } from "./model";
import { AXIS_NAMES } from "./plot";

export function columns(model: Model): { head: string[]; rows: (number | null)[][] } {
  const lists = [
    ...model.lines.map((line) => ({ name: line.faint ? `${line.label}, raw` : line.label, x: line.x, y: line.y })),
    ...(model.stack?.parts.map((part) => ({ name: part.name, x: model.stack!.x, y: part.y })) ?? []),
  ];
  const raw = new Set(model.lines.filter((line) => line.faint).map((line) => line.metric));
  lists.forEach((list, k) => {
    const line = model.lines[k];
    if (line && !line.faint && raw.has(line.metric)) list.name += ", smoothed";
  });
  const byX = new Map<number, (number | null)[]>();
  lists.forEach((list, k) =>
    list.x.forEach((x, i) => {
      const y = list.y[i];
      if (x === null || y === null || y === undefined) return;
      if (!byX.has(x)) byX.set(x, new Array(lists.length).fill(null));
      byX.get(x)![k] = y;
    }),
  );
  if (model.heat && !lists.length) {
    const { x, edges, counts } = model.heat;
    return { head: [AXIS_NAMES[model.axis], ...edges.slice(0, -1).map((e) => `from ${format.number(e)}`)], rows: x.map((v, i) => [v, ...counts[i]]) };
  }
  const rows = [...byX].sort((a, b) => a[0] - b[0]).map(([x, values]) => [x, ...values]);
  return { head: [AXIS_NAMES[model.axis], ...lists.map((list) => list.name)], rows };
}

export function csv(model: Model): string {
  const { head, rows } = columns(model);
  const quote = (text: string): string => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  return [head.map(quote).join(","), ...rows.map((row) => row.map((v) => (v === null ? "" : String(v))).join(","))].join("\n") + "\n";
}

const escape = (text: string): string => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

const W = 900;
const H = 380;
const BOX = { left: 64, right: 880, top: 44, bottom: 336 };

/** Every pixel column keeps its lowest and highest value, so that no spike is lost. */
function path(line: Line, px: (v: number) => number, py: (v: number) => number, log: boolean): string {
  let text = "";
  let open = false;
  let column: { x: number; low: number; high: number } | null = null;
  const flush = (): void => {
    if (!column) return;
    text += `${open ? "L" : "M"}${column.x.toFixed(1)} ${column.high.toFixed(1)}`;
    if (column.low !== column.high) text += `L${column.x.toFixed(1)} ${column.low.toFixed(1)}`;
    open = true;
    column = null;
  };
  line.y.forEach((y, i) => {
    const x = line.x[i];
    if (x === null || y === null || y === undefined || (log && y <= 0)) {
      if (!line.joined && x !== null) flush(), (open = false);
      return;
    }
    const [cx, cy] = [Math.round(px(x) * 2) / 2, py(y)];
    if (column && column.x === cx) (column.low = Math.max(column.low, cy)), (column.high = Math.min(column.high, cy));
    else flush(), (column = { x: cx, low: cy, high: cy });
  });
  flush();
  return text;
}

export function svg(model: Model, palette: Palette, log: boolean, zoom: [number, number] | null): string {
  const within = (x: number | null): x is number => x !== null && (!zoom || (x >= zoom[0] && x <= zoom[1]));
  const xs = [...model.lines.flatMap((l) => l.x), ...(model.stack?.x ?? []), ...(model.heat?.x ?? [])].filter(within);
  const ys = model.lines.flatMap((l) => l.y.filter((v, i) => v !== null && within(l.x[i]) && (!log || v > 0))) as number[];
  if (model.stack) model.stack.x.forEach((_, i) => ys.push(model.stack!.parts.reduce((s, p) => s + (p.y[i] ?? 0), 0)));
  if (model.stack || model.zero) ys.push(log ? Math.min(...ys) : 0);
  if (model.heat) ys.push(model.heat.edges[0], model.heat.edges.at(-1)!);
  const span = (list: number[]): [number, number] => {
    const [low, high] = list.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
    return low < high ? [low, high] : [low - 0.5, low + 0.5];
  };
  const [x0, x1] = span(xs);
  const [y0, y1] = span(ys);
  const scale = (v: number): number => (log ? Math.log10(Math.max(v, 1e-12)) : v);
  const px = (v: number): number => BOX.left + ((v - x0) / (x1 - x0)) * (BOX.right - BOX.left);
  const py = (v: number): number => BOX.bottom - ((scale(v) - scale(y0)) / (scale(y1) - scale(y0) || 1)) * (BOX.bottom - BOX.top);
  const parts: string[] = [];
  const text = (x: number, y: number, s: string, more = ""): number => parts.push(`<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" fill="${palette.mut}" ${more}>${escape(s)}</text>`);
  const rect = (x: number, y: number, w: number, h: number, fill: string, more = ""): number =>
    parts.push(`<rect x="${x.toFixed(1)}" y="${y.toFixed(1)}" width="${Math.max(0.5, w).toFixed(1)}" height="${Math.max(0, h).toFixed(1)}" fill="${fill}" ${more}/>`);

  for (const band of model.bands) {
    const top = band.high === null ? BOX.top : Math.max(BOX.top, py(band.high));
    const bottom = band.low === null ? BOX.bottom : Math.min(BOX.bottom, py(band.low));
    rect(px(Math.max(band.from, x0)), top, px(Math.min(band.to, x1)) - px(Math.max(band.from, x0)), bottom - top, palette.band);
  }
  const values = log ? ticks(scale(y0), scale(y1), 5).map((e) => 10 ** e) : ticks(y0, y1, 5);
  for (const v of values) {
    parts.push(`<path d="M${BOX.left} ${py(v).toFixed(1)}H${BOX.right}" stroke="${palette.grid}"/>`);
    text(BOX.left - 8, py(v) + 4, format.isShare(model.unit) ? format.percent(v) : format.number(v), 'text-anchor="end"');
  }
  for (const v of ticks(x0, x1, 8)) text(px(v), BOX.bottom + 20, format.number(v, 4), 'text-anchor="middle"');
  if (model.heat) heat(model, rect, px, py, palette);
  if (model.stack) stack(model, rect, px, py, palette);
  for (const mark of model.marks) if (within(mark.x)) parts.push(`<path d="M${px(mark.x).toFixed(1)} ${mark.kind === "bad" ? BOX.bottom - 8 : BOX.top}V${BOX.bottom}" stroke="${palette[mark.kind === "bad" ? "bad" : mark.kind === "best" ? "eval" : "mut"]}"><title>${escape(mark.text)}</title></path>`);
  for (const line of model.lines) {
    const seen: Line = { ...line, y: line.y.map((v, i) => (within(line.x[i]) ? v : null)) };
    parts.push(`<path d="${path(seen, px, py, log)}" fill="none" stroke="${palette[line.colour]}" stroke-width="${line.width}" stroke-linejoin="round"${line.dash ? ` stroke-dasharray="${line.dash}" stroke-linecap="round"` : ""}${line.faint ? ' opacity="0.3"' : ""}/>`);
    if (line.dots) seen.y.forEach((v, i) => v !== null && line.x[i] !== null && parts.push(`<circle cx="${px(line.x[i]!).toFixed(1)}" cy="${py(v).toFixed(1)}" r="3.5" fill="${palette[line.colour]}"/>`));
  }
  let at = BOX.left;
  const names = [...model.lines.filter((l) => !l.faint).map((l) => [l.label, l.colour]), ...(model.stack?.parts.map((p) => [p.name, p.colour]) ?? [])];
  for (const [name, colour] of names) {
    rect(at, 358, 10, 10, palette[colour], 'rx="2"');
    text(at + 15, 367, name);
    at += 30 + name.length * 6.6;
  }
  const title = `<text x="20" y="26" fill="${palette.ink}" font-size="15" font-weight="600">${escape(model.title)}</text>`;
  const unit = `<text x="${BOX.right}" y="26" fill="${palette.mut}" text-anchor="end">${escape([model.unit, `by ${AXIS_NAMES[model.axis]}`].filter(Boolean).join(", "))}</text>`;
  const namespace = document.createElementNS("http://www.w3.org/2000/svg", "svg").namespaceURI;
  return `<svg xmlns="${namespace}" viewBox="0 0 ${W} ${H}" width="${W}" height="${H}" font-family="Inter, system-ui, sans-serif" font-size="12"><rect width="${W}" height="${H}" fill="${palette.card}"/>${title}${unit}${parts.join("")}</svg>\n`;
}

type Rect = (x: number, y: number, w: number, h: number, fill: string, more?: string) => number;

function stack(model: Model, rect: Rect, px: (v: number) => number, py: (v: number) => number, palette: Palette): void {
  const { x, parts } = model.stack!;
  const width = (BOX.right - BOX.left) / Math.max(1, x.length);
  x.forEach((v, i) => {
    if (v === null) return;
    let base = 0;
    for (const part of parts) {
      const y = part.y[i];
      if (!y) continue;
      rect(px(v) - width / 2, py(base + y), width, py(base) - py(base + y), palette[part.colour]);
      base += y;
    }
  });
}

function heat(model: Model, rect: Rect, px: (v: number) => number, py: (v: number) => number, palette: Palette): void {
  const { x, edges, counts } = model.heat!;
  const most = Math.max(1, ...counts.flat());
  const width = (BOX.right - BOX.left) / Math.max(1, x.length);
  x.forEach((v, i) => counts[i].forEach((c, k) => c && rect(px(v) - width / 2, py(edges[k + 1]), width, py(edges[k]) - py(edges[k + 1]), palette.heat, `opacity="${(0.1 + 0.7 * Math.sqrt(c / most)).toFixed(2)}"`)));
}

export function download(name: string, type: string, text: string): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
