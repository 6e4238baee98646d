// The head of the samples on the first screen: the worst groups of the last recorded step.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import type { Sample } from "../data";
import * as format from "../format";
import { href } from "../route";
import { source, type Opened } from "../store";
import { Chips } from "./chips";
import { firstLine, groupsOf, outcome, sortGroups } from "./groups";
import { Shown } from "./text";

export function lastStep(opened: Opened, kind: string): number | null {
  const steps = opened.run.value.samples.index.filter((i) => i.kind === kind).map((i) => i.step);
  return steps.length ? Math.max(...steps) : null;
}

export function SamplesHead({ opened, more }: { opened: Opened; more: () => void }): JSX.Element | null {
  const run = opened.run.value;
  const kind = lastStep(opened, "train") !== null ? "train" : "eval";
  const step = lastStep(opened, kind);
  const rows = useSignal<Sample[]>([]);
  useEffect(() => {
    if (step !== null) void source.value!.samples(run, kind, step).then((found) => (rows.value = found));
  }, [run.id, kind, step]);
  if (step === null) return null;
  const groups = sortGroups(groupsOf(rows.value, step), "mean", new Map()).slice(0, 5);
  const widest = Math.max(1, ...groups.map((g) => g.samples.length));
  return (
    <section class="card samples-head">
      <div class="card-head"><h3>Samples <span>worst groups of step {step}</span></h3><span class="readout" /><button type="button" class="button" onClick={more}>All samples</button></div>
      <div class="scroll-x"><table class="list">
        <thead><tr><th>prompt</th><th>a wrong answer</th><th>{widest > 1 ? `the group's ${widest} samples` : "outcome"}</th><th class="num">mean reward</th><th class="num">tokens</th><th>ended by</th></tr></thead>
        <tbody>
          {groups.map((g) => {
            const worst = g.samples.find((s) => outcome(s) !== "right") ?? g.samples[0];
            return (
              <tr key={g.id}>
                <td class="mono clip"><a href={href("samples", { kind, step: String(step), group: g.id })}><Shown text={firstLine(g.prompt) || "(empty)"} /></a></td>
                <td class="mono clip"><Shown text={firstLine(worst.failure ? String(worst.failure) : lastLine(worst.completion ?? ""))} /></td>
                <td><Chips samples={g.samples} /></td>
                <td class="num">{format.number(g.mean, 2)}</td><td class="num">{format.number(g.tokens)}</td><td>{worst.failure ? "failure" : format.visible(worst.finish ?? format.DASH)}</td>
              </tr>
            );
          })}
        </tbody>
      </table></div>
    </section>
  );
}

/** The answer is most often in the last line. */
const lastLine = (text: string): string => text.trim().split("\n").at(-1) ?? "";
