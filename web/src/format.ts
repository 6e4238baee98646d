// Numbers and times as people read them. A thin space stands before the unit.
const SUPERSCRIPT: Record<string, string> = {
  "-": "\u207b", "0": "\u2070", "1": "\u00b9", "2": "\u00b2", "3": "\u00b3", "4": "\u2074", "5": "\u2075", "6": "\u2076", "7": "\u2077", "8": "\u2078", "9": "\u2079",
};

export const DASH = "\u2013";

function scientific(value: number): string {
  const [mantissa, exponent] = value.toExponential(1).split("e");
  const power = [...String(Number(exponent))].map((c) => SUPERSCRIPT[c]).join("");
  return `${mantissa.replace(/\.0$/, "")} \u00d7 10${power}`;
}

/** Three digits that matter; large numbers with k and M, very small ones as a power of ten. */
export function number(value: number | null | undefined, digits = 3): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return scientific(value);
  if (size >= 1e12) return scientific(value);
  if (size >= 1e9) return `${trim(value / 1e9, digits)}B`;
  if (size >= 1e6) return `${trim(value / 1e6, digits)}M`;
  if (size >= 1e4) return `${trim(value / 1e3, digits)}k`;
  return trim(value, digits);
}

function trim(value: number, digits: number): string {
  const size = Math.abs(value);
  const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  const text = value.toFixed(Math.min(places, 8));
  return Number.isInteger(value) && size < 1e4 ? String(value) : text;
}

const SHARES = new Set(["share", "%", "percent", "fraction"]);

export const isShare = (unit: string | null | undefined): boolean => {
  const first = (unit ?? "").split(/[ ,]/)[0];
  return SHARES.has(first);
};

export function percent(share: number | null | undefined, places?: number): string {
  if (share === null || share === undefined || !Number.isFinite(share)) return DASH;
  const value = share * 100;
  const size = Math.abs(value);
  const digits = places ?? (size === 0 || size >= 9.95 ? 0 : size >= 0.095 ? 1 : 2);
  return `${value.toFixed(digits)}\u2009%`;
}

/** pass@k is a share in whatever chart it stands. */
export const unitOf = (metric: string, unit: string | null): string | null => (/eval\/pass@/.test(metric) ? "share" : unit);

/** A number on an axis: no digits that say nothing. */
export function tick(v: number): string {
  const text = number(Number(v.toPrecision(6)));
  return /\d\.\d/.test(text) && !text.includes("\u00d7") ? text.replace(/\.?0+(?=[kMB]?$)/, "") : text;
}

/** The value of a metric in its unit, for a card or a tooltip. */
export function value(v: number | null | undefined, unit: string | null | undefined): string {
  if (isShare(unit)) return percent(v);
  if (unit === "s" || unit === "seconds") return seconds(v);
  if (unit === "GiB") return number(v);
  return number(v);
}

/** What stands behind the value: "of groups", "nats a token". A share is a percentage already. */
export function unitText(unit: string | null | undefined): string {
  if (!unit || unit === "s" || unit === "seconds") return "";
  return isShare(unit) ? unit.replace(/^(share|%|percent|fraction)[ ,]*/, "") : unit;
}

export function seconds(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  if (value < 0.01 && value > 0) return `${(value * 1000).toFixed(value < 0.001 ? 2 : 1)}\u2009ms`;
  if (value < 10) return `${value.toFixed(2)}\u2009s`;
  if (value < 60) return `${value.toFixed(1)}\u2009s`;
  return duration(value);
}

export function duration(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const whole = Math.round(value);
  if (whole < 60) return `${whole}s`;
  const [d, h, m, s] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60, whole % 60];
  if (d) return `${d}d ${h}h`;
  if (h) return `${h}h ${m}m`;
  return `${m}m ${s}s`;
}

export function microseconds(us: number): string {
  if (us < 1000) return `${us.toFixed(0)}\u2009\u00b5s`;
  if (us < 1e6) return `${(us / 1e3).toFixed(us < 1e5 ? 1 : 0)}\u2009ms`;
  return seconds(us / 1e6);
}

export function bytes(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return DASH;
  const gib = value / 2 ** 30;
  if (gib >= 0.095) return `${gib.toFixed(gib >= 100 ? 0 : gib >= 10 ? 1 : 2)}\u2009GiB`;
  const mib = value / 2 ** 20;
  if (mib >= 0.95) return `${mib.toFixed(mib >= 10 ? 0 : 1)}\u2009MiB`;
  return `${(value / 1024).toFixed(0)}\u2009KiB`;
}

const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
const two = (n: number): string => String(n).padStart(2, "0");

export function when(at: number | null | undefined): string {
  if (!at) return DASH;
  const d = new Date(at * 1000);
  return `${d.getDate()} ${MONTHS[d.getMonth()]} ${d.getFullYear()}, ${two(d.getHours())}:${two(d.getMinutes())}`;
}

export function clock(at: number | null | undefined): string {
  if (!at) return DASH;
  const d = new Date(at * 1000);
  return `${two(d.getHours())}:${two(d.getMinutes())}:${two(d.getSeconds())}`;
}

export const count = (n: number | null | undefined): string => (n === null || n === undefined ? DASH : n.toLocaleString("en-US"));

export function plural(n: number, one: string, many = `${one}s`): string {
  return `${count(n)} ${n === 1 ? one : many}`;
}

export function json(value: unknown): string {
  if (value === null || value === undefined) return "null";
  return visible(typeof value === "string" ? value : JSON.stringify(value));
}

// Controls except tab and newline; marks that reorder or hide text; line separators; halves of pairs.
export const HIDDEN = /([\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]|[\ud800-\udbff](?![\udc00-\udfff])|(?<![\ud800-\udbff])[\udc00-\udfff])/;

export function named(char: string): string {
  const code = char.charCodeAt(0);
  if (code < 0x20) return `\\x${code.toString(16).padStart(2, "0")}`;
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Text of a run where only plain text can stand, such as an option or a title: hidden characters by name. */
export const visible = (text: string): string => text.split(HIDDEN).map((part, k) => (k % 2 ? `[${named(part)}]` : part)).join("");
