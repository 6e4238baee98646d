// One mark for every sample of a group. The shape tells the outcome: filled right, hollow wrong, striped cut off, cross failed.
import type { JSX } from "preact";
import type { Sample } from "../data";
import * as format from "../format";
import { firstLine, outcome } from "./groups";

const NAMES = { right: "right", wrong: "wrong", cut: "cut off", failed: "failed" };

export function Chips({ samples, chosen, choose }: { samples: Sample[]; chosen?: number; choose?: (index: number) => void }): JSX.Element {
  const top = Math.max(1, ...samples.map((s) => s.reward ?? 0));
  return (
    <span class="chips">
      {samples.map((s, k) => {
        const kind = outcome(s, top);
        const text = `sample ${s.sample ?? k}: ${NAMES[kind]}, reward ${format.number(s.reward)}`;
        const title = format.visible(`${text}: ${firstLine(s.completion ?? "").slice(0, 80)}`);
        if (!choose) return <i key={k} class={`chip ${kind}`} title={title} role="img" aria-label={text} />;
        return <button key={k} type="button" class={`chip ${kind}`} aria-label={text} title={title} aria-pressed={chosen === k} onClick={(e) => (e.stopPropagation(), choose(k))} />;
      })}
    </span>
  );
}

export function ChipLegend(): JSX.Element {
  return <p class="chip-legend">{(["right", "wrong", "cut", "failed"] as const).map((kind) => <span key={kind}><i class={`chip ${kind}`} />{NAMES[kind]}</span>)}</p>;
}
