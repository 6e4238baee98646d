// The numbers of a run: one row a step, one column a metric. Columns of the report are unpacked when first asked for.
import type { Column, Run } from "./data";

export type Values = (number | null)[];

function bytesOf(base64: string): Uint8Array {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}

export function unpack(column: Column): Values {
  const size = column.f64 === undefined ? 4 : 8;
  const bytes = bytesOf(column.f64 ?? column.f32 ?? "");
  return floats(new DataView(bytes.buffer), 0, Math.min(column.n, Math.floor(bytes.length / size)), size);
}

/** Little-endian floats of `size` bytes; NaN means missing and becomes null, which is what a gap in a line is to uPlot. */
export function floats(view: DataView, offset: number, count: number, size: 4 | 8): Values {
  const values: Values = new Array(count);
  for (let i = 0; i < count; i++) {
    const value = size === 4 ? view.getFloat32(offset + 4 * i, true) : view.getFloat64(offset + 8 * i, true);
    values[i] = Number.isFinite(value) ? value : null;
  }
  return values;
}

export class Table {
  steps: number[] = [];
  private columns = new Map<string, Values>();
  private packed: Record<string, Column> = {};

  static of(run: Run): Table {
    const table = new Table();
    table.packed = { ...run.columns };
    table.steps = run.steps ? (unpack(run.steps) as number[]) : [];
    return table;
  }

  names(): string[] {
    return [...new Set([...Object.keys(this.packed), ...this.columns.keys()])].sort();
  }

  has(name: string): boolean {
    return this.columns.has(name) || name in this.packed;
  }

  get(name: string): Values | null {
    const known = this.columns.get(name);
    if (known) return known;
    const packed = this.packed[name];
    if (!packed) return null;
    const values = unpack(packed);
    this.columns.set(name, values);
    return values;
  }

  set(name: string, values: Values): void {
    this.columns.set(name, values);
  }

  last(name: string): number | null {
    const values = this.get(name);
    if (values) for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i];
    return null;
  }

  /** Rows that arrived while the page is open. A step that is there already is replaced: a resumed run writes it again. */
  append(rows: Record<string, unknown>[]): void {
    for (const row of rows) {
      const step = Number(row.step ?? this.steps.length);
      while (this.steps.length && this.steps[this.steps.length - 1] >= step) this.dropLast();
      this.steps.push(step);
      for (const name of Object.keys(row)) if (typeof row[name] === "number" && name !== "step" && !this.has(name)) this.set(name, []);
      for (const name of this.names()) {
        const values = this.get(name)!;
        while (values.length < this.steps.length - 1) values.push(null);
        const value = row[name];
        values.push(typeof value === "number" && Number.isFinite(value) ? value : null);
      }
    }
  }

  private dropLast(): void {
    this.steps.pop();
    for (const name of this.names()) {
      const values = this.get(name)!;
      values.length = Math.min(values.length, this.steps.length);
    }
  }
}
