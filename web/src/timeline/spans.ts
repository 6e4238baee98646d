// Spans sorted into rows, and what can be said about them without looking: slow steps, idle gaps. Pure.
import type { Trace } from "../data";
import { lowerBound } from "../math";

export interface Lane {
  name: string;
  depth: number; // rows that nested spans need
  start: Float64Array;
  end: Float64Array;
  level: Uint8Array;
  index: Int32Array; // into trace.spans
}

export interface Gap {
  start: number;
  end: number;
  after: string;
  before: string;
  step: number | null;
}

const MOST_LEVELS = 4;

export function trackName(trace: Trace, track: number | string): string {
  return typeof track === "number" ? (trace.tracks[track] ?? `track ${track}`) : track;
}

/** One lane a track, in the order in which Python names them; spans inside others are drawn a level lower. */
export function lanesOf(trace: Trace): Lane[] {
  const by = new Map<string, number[]>();
  for (const name of trace.tracks) by.set(name, []);
  trace.spans.forEach((span, i) => {
    const name = trackName(trace, span[0]);
    if (!by.has(name)) by.set(name, []);
    by.get(name)!.push(i);
  });
  return [...by].filter(([, list]) => list.length).map(([name, list]) => {
    list.sort((a, b) => trace.spans[a][2] - trace.spans[b][2] || trace.spans[b][3] - trace.spans[a][3]);
    const n = list.length;
    const lane: Lane = { name, depth: 1, start: new Float64Array(n), end: new Float64Array(n), level: new Uint8Array(n), index: Int32Array.from(list) };
    const open: number[] = [];
    list.forEach((i, k) => {
      const [, , start, duration] = trace.spans[i];
      lane.start[k] = start;
      lane.end[k] = start + duration;
      // Clocks are read one after the other: a span that begins just before its neighbour ends is no child of it.
      while (open.length && open[open.length - 1] <= start + Math.min(2000, duration / 2)) open.pop();
      lane.level[k] = Math.min(open.length, MOST_LEVELS - 1);
      open.push(start + duration);
      lane.depth = Math.max(lane.depth, lane.level[k] + 1);
    });
    return lane;
  });
}

export function extent(trace: Trace): [number, number] {
  let [low, high] = [Infinity, -Infinity];
  for (const [, , start, duration] of trace.spans) {
    if (start < low) low = start;
    if (start + duration > high) high = start + duration;
  }
  return low < high ? [low, high] : [0, 1];
}

export interface Slow {
  step: number;
  start: number;
  end: number;
  times: number; // of the median
}

export function stepsOf(trace: Trace): Slow[] {
  const by = new Map<number, [number, number]>();
  const phases = trace.tracks.indexOf("phases");
  for (const [track, , start, duration, step] of trace.spans) {
    if (step === null || step === undefined || (phases >= 0 && track !== phases && track !== "phases")) continue;
    const known = by.get(step);
    if (known) (known[0] = Math.min(known[0], start)), (known[1] = Math.max(known[1], start + duration));
    else by.set(step, [start, start + duration]);
  }
  const lengths = [...by.values()].map(([a, b]) => b - a).sort((a, b) => a - b);
  const median = lengths[lengths.length >> 1] || 1;
  return [...by].map(([step, [start, end]]) => ({ step, start, end, times: (end - start) / median }));
}

/** Stretches in which no phase runs, longest first, with what came after: that was waited for. */
export function gapsOf(trace: Trace, lanes: Lane[]): Gap[] {
  const lane = lanes.find((l) => l.name === "phases") ?? lanes[0];
  if (!lane) return [];
  const [low, high] = extent(trace);
  const shortest = Math.max((high - low) / 20000, 1000);
  const gaps: Gap[] = [];
  // Whole steps cover their own gaps: only the innermost spans count.
  const deepest = Math.max(...lane.level);
  const inner = (k: number): boolean => deepest === 0 || lane.level[k] > 0;
  let end: number | null = null;
  let last = -1;
  for (let k = 0; k < lane.index.length; k++) {
    if (!inner(k)) continue;
    if (end !== null && lane.start[k] - end > shortest) gaps.push({ start: end, end: lane.start[k], after: trace.spans[lane.index[last]][1], before: trace.spans[lane.index[k]][1], step: trace.spans[lane.index[k]][4] });
    if (end === null || lane.end[k] > end) (end = lane.end[k]), (last = k);
  }
  return gaps.sort((a, b) => b.end - b.start - (a.end - a.start));
}

/** Which span of a lane is at a time and level; the shortest where several are. */
export function spanAt(lane: Lane, at: number, level: number): number | null {
  let best: number | null = null;
  const until = lowerBound(lane.start, at + 1e-9);
  for (let k = until - 1; k >= 0 && k > until - 4000; k--) {
    if (lane.level[k] === level && lane.end[k] >= at) {
      best = lane.index[k];
      break;
    }
  }
  return best;
}
