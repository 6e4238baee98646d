// Pure functions on columns. null is a missing value everywhere.
import type { Values } from "./table";

/** Mean of a window around every value. At the ends the window is what is there; a gap stays a gap. */
export function smooth(values: Values, window: number): Values {
  if (window < 2) return values;
  const half = Math.floor(window / 2);
  const sums = new Float64Array(values.length + 1);
  const counts = new Int32Array(values.length + 1);
  for (let i = 0; i < values.length; i++) {
    sums[i + 1] = sums[i] + (values[i] ?? 0);
    counts[i + 1] = counts[i] + (values[i] === null ? 0 : 1);
  }
  return values.map((value, i) => {
    if (value === null) return null;
    const from = Math.max(0, i - half);
    const to = Math.min(values.length, i + half + 1);
    return (sums[to] - sums[from]) / (counts[to] - counts[from]);
  });
}

export const present = (values: Values): number[] => values.filter((v): v is number => v !== null);

export function countPresent(values: Values): number {
  let n = 0;
  for (const v of values) if (v !== null) n++;
  return n;
}

export function quantile(sorted: number[], q: number): number {
  if (!sorted.length) return NaN;
  const at = (sorted.length - 1) * q;
  const low = Math.floor(at);
  return sorted[low] + (at - low) * ((sorted[low + 1] ?? sorted[low]) - sorted[low]);
}

export function median(values: Values): number {
  return quantile(present(values).sort((a, b) => a - b), 0.5);
}

export function cumulative(values: Values): Values {
  let sum = 0;
  return values.map((v) => (sum += v ?? 0));
}

export const clamp = (v: number, low: number, high: number): number => Math.min(high, Math.max(low, v));

/** Index of the first element not below x in a sorted list. */
export function lowerBound(sorted: ArrayLike<number>, x: number): number {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Round steps for an axis: 1, 2 or 5 times a power of ten. */
export function ticks(low: number, high: number, about: number): number[] {
  const raw = (high - low) / Math.max(1, about);
  if (!(raw > 0) || !Number.isFinite(raw)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999)!;
  const result: number[] = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) result.push(Number((k * step).toPrecision(12)));
  return result;
}
