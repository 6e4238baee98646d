// Text of a model, shown as text. Nothing here makes HTML of it: characters that could hide or reorder others are shown by name.
import { useSignal } from "@preact/signals";
import type { ComponentChildren, JSX } from "preact";
import { HIDDEN, named } from "../format";


/** The text with its hidden characters made visible. */
export function Shown({ text }: { text: string }): JSX.Element {
  const parts = text.split(HIDDEN);
  return <>{parts.map((part, k) => (k % 2 ? <span key={k} class="ctl" title={`character U+${part.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}`}>{named(part)}</span> : part))}</>;
}

const MOST_CHARACTERS = 20_000;

export function Text({ text, markdown }: { text: string; markdown?: boolean }): JSX.Element {
  const all = useSignal(false);
  const cut = !all.value && text.length > MOST_CHARACTERS;
  const shown = cut ? text.slice(0, MOST_CHARACTERS) : text;
  return (
    <div class="text" dir="ltr">
      {markdown ? <Markdown text={shown} /> : <Shown text={shown} />}
      {cut && <p class="note"><button type="button" class="button" onClick={() => (all.value = true)}>Show all {text.length.toLocaleString("en-US")} characters</button></p>}
    </div>
  );
}

/** Headings, lists, emphasis and code. HTML stays text; links and images are written out, never followed or loaded. */
function Markdown({ text }: { text: string }): JSX.Element {
  const blocks: ComponentChildren[] = [];
  const lines = text.split("\n");
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i];
    if (/^\s*(```|~~~)/.test(line)) {
      const code: string[] = [];
      while (++i < lines.length && !/^\s*(```|~~~)/.test(lines[i])) code.push(lines[i]);
      blocks.push(<pre class="md-code mono"><Shown text={code.join("\n")} /></pre>);
    } else if (/^#{1,6} /.test(line)) blocks.push(<p class="md-head">{inline(line.replace(/^#+ /, ""))}</p>);
    else if (/^\s*([-*+]|\d+[.)]) /.test(line)) blocks.push(<p class="md-item">{line.match(/^\s*([-*+]|\d+[.)]) /)![1].replace(/[-*+]/, "\u2022")} {inline(line.replace(/^\s*([-*+]|\d+[.)]) /, ""))}</p>);
    else if (/^> ?/.test(line)) blocks.push(<p class="md-quote">{inline(line.replace(/^> ?/, ""))}</p>);
    else blocks.push(<p class="md-p">{inline(line)}</p>);
  }
  return <>{blocks}</>;
}

const INLINE = /(`[^`\n]+`|\*\*[^*\n]+\*\*|\*[^*\s][^*\n]*\*)/;

function inline(line: string): ComponentChildren[] {
  return line.split(INLINE).map((part, k) => {
    if (k % 2 === 0) return <Shown key={k} text={part} />;
    if (part.startsWith("`")) return <code key={k}><Shown text={part.slice(1, -1)} /></code>;
    if (part.startsWith("**")) return <b key={k}><Shown text={part.slice(2, -2)} /></b>;
    return <em key={k}><Shown text={part.slice(1, -1)} /></em>;
  });
}

const MOST_WORDS = 1500;
type Edit = ["same" | "out" | "in", string];

/** Word by word: the longest list of words that both have stays, the rest went out or came in. */
export function difference(before: string, after: string): { edits: Edit[]; cut: boolean } {
  const words = (text: string): string[] => text.split(/(\s+)/).filter((w) => w !== "");
  const [a, b] = [words(before), words(after)];
  const cut = a.length > MOST_WORDS || b.length > MOST_WORDS;
  a.length = Math.min(a.length, MOST_WORDS);
  b.length = Math.min(b.length, MOST_WORDS);
  const width = b.length + 1;
  const table = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      table[i * width + j] = a[i] === b[j] ? table[(i + 1) * width + j + 1] + 1 : Math.max(table[(i + 1) * width + j], table[i * width + j + 1]);
  const edits: Edit[] = [];
  const add = (kind: Edit[0], word: string): void => {
    const last = edits.at(-1);
    if (last?.[0] === kind) last[1] += word;
    else edits.push([kind, word]);
  };
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) add("same", a[i++]), j++;
    else if (j >= b.length || (i < a.length && table[(i + 1) * width + j] >= table[i * width + j + 1])) add("out", a[i++]);
    else add("in", b[j++]);
  }
  return { edits, cut };
}

export function Difference({ before, after }: { before: string; after: string }): JSX.Element {
  const { edits, cut } = difference(before, after);
  return (
    <div class="text diff" dir="ltr">
      {edits.map(([kind, text], k) => (kind === "same" ? <span key={k}><Shown text={text} /></span> : kind === "out" ? <del key={k}><Shown text={text} /></del> : <ins key={k}><Shown text={text} /></ins>))}
      {cut && <p class="note">The first {MOST_WORDS} words are compared.</p>}
    </div>
  );
}
