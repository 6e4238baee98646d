// Small parts that every page uses.
import { useSignal } from "@preact/signals";
import type { ComponentChildren, JSX } from "preact";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { visible } from "./format";

/** A level has a shape as well as a colour, so that it reads without colour. */
const SHAPES: Record<string, [string, string]> = {
  ok: ["\u2713", "healthy"],
  info: ["i", "note"],
  warn: ["!", "warning"],
  bad: ["\u00d7", "bad"],
  error: ["\u00d7", "error"],
  unknown: ["", "not judged"],
  unjudged: ["", "not judged"],
};

export function LevelMark({ level, title }: { level: string; title?: string }): JSX.Element {
  const [shape, name] = SHAPES[level] ?? SHAPES.unknown;
  return (
    <i class={`st ${level}`} role="img" aria-label={title ?? name} title={title ?? name}>
      {shape}
    </i>
  );
}

export function Card(props: { title?: ComponentChildren; sub?: ComponentChildren; tools?: ComponentChildren; class?: string; children: ComponentChildren }): JSX.Element {
  return (
    <article class={`card ${props.class ?? ""}`}>
      {(props.title || props.tools) && (
        <div class="card-head">
          <h3>
            {props.title} {props.sub && <span>{props.sub}</span>}
          </h3>
          {props.tools}
        </div>
      )}
      {props.children}
    </article>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }): JSX.Element {
  return (
    <div class="empty">
      <b>{title}</b>
      {children && <p>{children}</p>}
    </div>
  );
}

export function Copy({ text, label }: { text: string; label?: string }): JSX.Element {
  const done = useSignal(false);
  const copy = async (): Promise<void> => {
    await copyText(text);
    done.value = true;
    setTimeout(() => (done.value = false), 1500);
  };
  return (
    <button type="button" class="copy" onClick={() => void copy()} aria-label={label ?? `Copy ${text}`} title="copy">
      <code>{text}</code>
      <span class="copied" aria-live="polite">{done.value ? "copied" : ""}</span>
    </button>
  );
}

export async function copyText(text: string): Promise<void> {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // a file has no clipboard permission in some browsers: the old way still works there
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
}

export function Choose<T extends string>(props: { label: string; value: T; options: [T, string, boolean?][]; onChange: (value: T) => void }): JSX.Element {
  return (
    <label class="choose">
      <span>{props.label}</span>
      <select value={props.value} onChange={(e) => props.onChange(e.currentTarget.value as T)}>
        {props.options.map(([value, text, off]) => (
          <option key={value} value={value} disabled={off}>
            {visible(text)}
          </option>
        ))}
      </select>
    </label>
  );
}

/** Draws only the rows that are in view. All rows have one height. */
export function VirtualList(props: { count: number; row: number; height: number; render: (index: number) => JSX.Element; label: string; reveal?: number }): JSX.Element {
  const top = useSignal(0);
  const box = useRef<HTMLDivElement>(null);
  const height = Math.min(props.height, Math.max(props.count, 1) * props.row);
  const first = Math.max(0, Math.floor(top.value / props.row) - 5);
  const last = Math.min(props.count, Math.ceil((top.value + height) / props.row) + 5);
  const rows = [];
  for (let i = first; i < last; i++) rows.push(props.render(i));
  useEffect(() => {
    const { reveal } = props;
    if (reveal === undefined || reveal < 0 || !box.current) return;
    const [y, from] = [reveal * props.row, box.current.scrollTop];
    if (y < from) box.current.scrollTop = y;
    else if (y + props.row > from + height) box.current.scrollTop = y + props.row - height;
  }, [props.reveal]);
  return (
    <div class="virtual" ref={box} tabIndex={0} role="region" aria-label={props.label} style={{ height: `${height}px` }} onScroll={(e) => (top.value = e.currentTarget.scrollTop)}>
      <div style={{ height: `${first * props.row}px` }} />
      {rows}
      <div style={{ height: `${(props.count - last) * props.row}px` }} />
    </div>
  );
}

/** The width of an element, followed while it changes. */
export function useWidth<T extends HTMLElement>(): [{ current: T | null }, number] {
  const ref = useRef<T>(null);
  const width = useSignal(0);
  useLayoutEffect(() => {
    const element = ref.current!;
    width.value = element.clientWidth;
    const observer = new ResizeObserver(() => (width.value = element.clientWidth));
    observer.observe(element);
    return () => observer.disconnect();
  }, []);
  return [ref, width.value];
}

/** True once the element has come near the window: what is far below costs nothing until then. */
export function useSeen<T extends Element>(): [{ current: T | null }, boolean] {
  const ref = useRef<T>(null);
  const seen = useSignal(false);
  useLayoutEffect(() => {
    const box = ref.current!.getBoundingClientRect();
    if (box.top < innerHeight + 300) seen.value = true;
    if (seen.value) return;
    const observer = new IntersectionObserver((entries) => {
      if (entries.some((e) => e.isIntersecting)) (seen.value = true), observer.disconnect();
    }, { rootMargin: "300px" });
    observer.observe(ref.current!);
    const print = (): void => void (seen.value = true);
    addEventListener("beforeprint", print);
    return () => (observer.disconnect(), removeEventListener("beforeprint", print));
  }, []);
  return [ref, seen.value];
}

/** A chart's tools, closed by a click elsewhere or Escape. */
export function Menu({ label, children }: { label: string; children: ComponentChildren }): JSX.Element {
  const ref = useRef<HTMLDetailsElement>(null);
  useEffect(() => {
    const close = (e: Event): void => {
      if (ref.current?.open && !(e.type === "click" && e.target === ref.current.firstChild) && (e.type !== "keydown" || (e as KeyboardEvent).key === "Escape")) ref.current.open = false;
    };
    addEventListener("click", close);
    addEventListener("keydown", close);
    return () => (removeEventListener("click", close), removeEventListener("keydown", close));
  }, []);
  return (
    <details class="menu" ref={ref}>
      <summary aria-label={label} title={label}>{"\u22ef"}</summary>
      <div class="menu-box">{children}</div>
    </details>
  );
}
