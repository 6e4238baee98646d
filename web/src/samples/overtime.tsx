// The same prompt over time: every recorded completion of a prompt, and two of them word by word.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import type { Sample } from "../data";
import * as format from "../format";
import { set } from "../route";
import { source, type Opened } from "../store";
import { Choose } from "../ui";
import { Chips } from "./chips";
import { Difference } from "./text";

const MOST_STEPS = 40;

export function OverTime({ opened, kind, id, now }: { opened: Opened; kind: string; id: string; now: Sample }): JSX.Element | null {
  const found = useSignal<{ step: number; samples: Sample[] }[]>([]);
  const other = useSignal<string>("");
  const run = opened.run.value;
  useEffect(() => {
    let wanted = true;
    found.value = [];
    other.value = "";
    const steps = run.samples.index.filter((i) => i.kind === kind).map((i) => i.step).sort((a, b) => a - b);
    const every = Math.ceil(steps.length / MOST_STEPS);
    const asked = steps.filter((s, k) => source.value!.mode === "report" || k % every === 0 || s === now.step);
    const read = async (): Promise<void> => {
      const rows: { step: number; samples: Sample[] }[] = [];
      for (const step of asked) {
        const samples = (await source.value!.samples(run, kind, step).catch(() => [])).filter((s) => String(s.prompt_id) === id);
        if (samples.length) rows.push({ step, samples });
        if (!wanted) return;
      }
      found.value = rows;
    };
    void read();
    return () => void (wanted = false);
  }, [run.id, kind, id]);
  if (found.value.length < 2) return null;
  const choices = found.value.flatMap(({ step, samples }) => samples.map((s, k): [string, string] => [`${step}:${k}`, `step ${step}, sample ${s.sample ?? k}`]));
  const [step, k] = other.value.split(":").map(Number);
  const before = found.value.find((f) => f.step === step)?.samples[k];
  return (
    <div class="overtime">
      <h3>The same prompt over time <span>{format.plural(found.value.length, "step")}</span></h3>
      <table class="list"><tbody>
        {found.value.map((f) => (
          <tr key={f.step} class={f.step === now.step ? "best" : ""}>
            <td><button type="button" class="link" onClick={() => set({ step: String(f.step), group: id, sample: null, by: null })}>step {f.step}</button></td>
            <td><Chips samples={f.samples} /></td><td class="num">mean {format.number(f.samples[0].group_mean ?? f.samples[0].reward, 2)}</td>
          </tr>
        ))}
      </tbody></table>
      <div class="toolbar"><Choose label="compare this sample with" value={other.value} options={[["", "choose"], ...choices]} onChange={(v) => (other.value = v)} /></div>
      {before && <Difference before={before.completion ?? ""} after={now.completion ?? ""} />}
    </div>
  );
}
