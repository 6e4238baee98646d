// Paints the timeline. Spans narrower than a pixel are merged with their neighbours, so that the cost depends on the width, not on the number.
import type { Trace } from "../data";
import * as format from "../format";
import { lowerBound, ticks } from "../math";
import { PHASES, type Palette } from "../theme";
import type { Gap, Lane } from "./spans";

export const ROW = 20;
export const LEFT = 108;
export const TOP = 22;
export const COUNTER = 46;

export interface View {
  from: number;
  to: number;
  width: number;
  zero: number;
}

const PARTS: Record<string, string> = {
  prefill: "rollout", decode: "rollout", "micro-batch": "update", microbatch: "update", optimizer: "update", forward: "update", backward: "update", offload: "update", evaluation: "eval", judge: "reward",
};
const LANES: Record<string, string> = { engine: "rollout", update: "update", rewards: "reward", environments: "score", checkpoints: "checkpoint" };

export function colourOf(name: string, lane: string): string {
  const word = name.toLowerCase();
  const phase = PHASES.find((p) => word === p || word.startsWith(`${p}:`) || word.startsWith(`${p} `));
  if (phase) return phase;
  const part = Object.keys(PARTS).find((p) => word.startsWith(p));
  if (part) return PARTS[part];
  return LANES[lane] ?? (word.startsWith("step") ? "metric3" : "idle");
}

export const laneTops = (lanes: Lane[]): number[] => {
  let y = TOP;
  return lanes.map((lane) => {
    const top = y;
    y += lane.depth * ROW + 8;
    return top;
  });
};

export function heightOf(lanes: Lane[], counters: number): number {
  return TOP + lanes.reduce((sum, lane) => sum + lane.depth * ROW + 8, 0) + counters * (COUNTER + 8) + 6;
}

export function draw(ctx: CanvasRenderingContext2D, trace: Trace, lanes: Lane[], gaps: Gap[], view: View, palette: Palette, chosen: number | null): number {
  const { from, to, width } = view;
  const height = heightOf(lanes, Object.keys(trace.counters).length);
  const scale = (width - LEFT) / (to - from);
  const px = (t: number): number => LEFT + (t - from) * scale;
  ctx.clearRect(0, 0, width, height);
  ctx.font = '11px Inter, system-ui, sans-serif';
  ctx.textBaseline = "middle";
  let painted = 0;

  for (const v of ticks((from - view.zero) / 1e6, (to - view.zero) / 1e6, Math.max(2, width / 130))) {
    const x = px(v * 1e6 + view.zero);
    if (x < LEFT) continue;
    ctx.fillStyle = palette.grid;
    ctx.fillRect(x, TOP - 4, 1, height - TOP);
    ctx.fillStyle = palette.faint;
    ctx.textAlign = "center";
    ctx.fillText(tickText(v, (to - from) / 1e6), Math.max(x, LEFT + 16), 9);
  }

  const tops = laneTops(lanes);
  ctx.save();
  ctx.beginPath();
  ctx.rect(LEFT, 0, width - LEFT, height);
  ctx.clip();
  lanes.forEach((lane, n) => {
    const first = Math.max(0, lowerBound(lane.start, from) - 500);
    const drawnTo = new Float64Array(lane.depth).fill(-1);
    for (let k = first; k < lane.start.length && lane.start[k] < to; k++) {
      if (lane.end[k] < from) continue;
      const level = lane.level[k];
      const x1 = Math.max(px(lane.start[k]), LEFT);
      const x2 = Math.min(Math.max(px(lane.end[k]), x1 + 0.8), width);
      if (x2 <= drawnTo[level]) continue; // this pixel is painted already
      const span = trace.spans[lane.index[k]];
      const colour = colourOf(span[1], lane.name);
      const y = tops[n] + level * ROW;
      ctx.fillStyle = palette[colour];
      ctx.fillRect(x1, y, Math.max(x2 - x1 - (x2 - x1 > 3 ? 0.8 : 0), 0.8), ROW - 3);
      painted++;
      drawnTo[level] = Math.ceil(x2 - 0.2);
      if (lane.index[k] === chosen) {
        ctx.strokeStyle = palette.ink;
        ctx.lineWidth = 2;
        ctx.strokeRect(x1 + 1, y + 1, Math.max(x2 - x1 - 2, 1), ROW - 5);
      }
      if (x2 - x1 > 34) {
        const text = fit(ctx, span[1], x2 - x1 - 8);
        ctx.fillStyle = ["rollout", "update", "eval", "checkpoint"].includes(colour) ? palette.onbar : colour === "metric3" || colour === "idle" ? palette.ink : "#10161d";
        ctx.textAlign = "left";
        if (text) ctx.fillText(text, x1 + 5, y + (ROW - 3) / 2 + 0.5);
      }
    }
    if (lane.name === "phases" || n === 0) drawIdle(ctx, gaps, lane, tops[n], view, px, palette);
  });
  ctx.restore();

  ctx.textAlign = "right";
  lanes.forEach((lane, n) => {
    ctx.fillStyle = palette.mut;
    ctx.fillText(fit(ctx, lane.name, LEFT - 16), LEFT - 10, tops[n] + (ROW - 3) / 2);
  });
  drawCounters(ctx, trace, view, px, height, palette);
  return painted;
}

/** Idle is drawn: a hatched block, with what was waited for. */
function drawIdle(ctx: CanvasRenderingContext2D, gaps: Gap[], lane: Lane, top: number, view: View, px: (t: number) => number, palette: Palette): void {
  const y = top + (lane.depth > 1 ? ROW : 0);
  for (const gap of gaps) {
    const [x1, x2] = [Math.max(px(gap.start), LEFT), Math.min(px(gap.end), view.width)];
    if (x2 - x1 < 2) continue;
    ctx.save();
    ctx.beginPath();
    ctx.rect(x1, y, x2 - x1, ROW - 3);
    ctx.clip();
    ctx.strokeStyle = palette.faint;
    ctx.globalAlpha = 0.5;
    ctx.lineWidth = 1;
    for (let x = x1 - ROW; x < x2; x += 5) {
      ctx.beginPath();
      ctx.moveTo(x, y + ROW);
      ctx.lineTo(x + ROW, y);
      ctx.stroke();
    }
    ctx.globalAlpha = 1;
    if (x2 - x1 > 90) {
      ctx.fillStyle = palette.card;
      const text = fit(ctx, `idle, then ${gap.before}`, x2 - x1 - 12);
      ctx.fillRect(x1 + 3, y + 2, ctx.measureText(text).width + 6, ROW - 7);
      ctx.fillStyle = palette.mut;
      ctx.textAlign = "left";
      ctx.fillText(text, x1 + 6, y + (ROW - 3) / 2 + 0.5);
    }
    ctx.restore();
  }
}

function drawCounters(ctx: CanvasRenderingContext2D, trace: Trace, view: View, px: (t: number) => number, height: number, palette: Palette): void {
  const names = Object.keys(trace.counters);
  names.forEach((name, n) => {
    const points = trace.counters[name];
    const bottom = height - 6 - (names.length - 1 - n) * (COUNTER + 8);
    const most = points.reduce((m, [, v]) => Math.max(m, v), 0) || 1;
    ctx.textAlign = "right";
    ctx.fillStyle = palette.mut;
    ctx.fillText(fit(ctx, name, LEFT - 16), LEFT - 10, bottom - COUNTER + 10);
    ctx.fillStyle = palette.faint;
    ctx.fillText(format.number(most), LEFT - 10, bottom - COUNTER + 24);
    ctx.save();
    ctx.beginPath();
    ctx.rect(LEFT, bottom - COUNTER, view.width - LEFT, COUNTER);
    ctx.clip();
    ctx.beginPath();
    ctx.moveTo(LEFT, bottom);
    let at = 0;
    // A counter holds its value until the next one: steps, not slopes. Of every pixel the highest is kept.
    let pixel = -1;
    for (const [t, v] of points) {
      if (t > view.to) break;
      const x = Math.max(px(t), LEFT);
      if (Math.round(x) === pixel && v <= at) continue;
      ctx.lineTo(x, bottom - (at / most) * (COUNTER - 4));
      at = v;
      pixel = Math.round(x);
      ctx.lineTo(x, bottom - (v / most) * (COUNTER - 4));
    }
    ctx.lineTo(view.width, bottom - (at / most) * (COUNTER - 4));
    ctx.lineTo(view.width, bottom);
    ctx.closePath();
    ctx.globalAlpha = 0.35;
    ctx.fillStyle = palette.metric2;
    ctx.fill();
    ctx.restore();
    ctx.fillStyle = palette.line;
    ctx.fillRect(LEFT, bottom, view.width - LEFT, 1);
  });
}

function tickText(seconds: number, span: number): string {
  if (span < 0.5) return `${(seconds * 1000).toFixed(span < 0.02 ? 2 : 0)} ms`;
  return seconds < 600 ? `${Number(seconds.toFixed(span < 5 ? 2 : span < 50 ? 1 : 0))} s` : format.duration(seconds);
}

function fit(ctx: CanvasRenderingContext2D, text: string, width: number): string {
  if (ctx.measureText(text).width <= width) return text;
  const keep = Math.floor((text.length * width) / ctx.measureText(text).width) - 1;
  return keep > 2 ? `${text.slice(0, keep)}\u2026` : "";
}
