// Learning: the catalogue's charts, then which held-out prompts were gained and lost.
import type { JSX } from "preact";
import { here } from "../chart/card";
import type { Run } from "../data";
import * as format from "../format";
import { href, param, set } from "../route";
import { Card, Choose } from "../ui";
import { ChartGrid, ChartTools } from "./charts";

type Results = Record<string, [boolean | null, number | null, number | null]>;

function changes(before: Results, after: Results): { gained: string[]; lost: string[]; both: number } {
  const right = (r: Results, id: string): boolean => !!r[id]?.[0];
  const common = Object.keys(after).filter((id) => id in before);
  return {
    gained: common.filter((id) => right(after, id) && !right(before, id)),
    lost: common.filter((id) => !right(after, id) && right(before, id)),
    both: common.length,
  };
}

function Gained({ run }: { run: Run }): JSX.Element | null {
  const results = run.evaluations.results;
  const steps = Object.keys(results ?? {}).map(Number).sort((a, b) => a - b);
  if (!results || steps.length < 2) return null;
  const from = Number(param("eval_from") ?? steps[0]);
  const to = Number(param("eval_to") ?? steps.at(-1));
  const { gained, lost, both } = changes(results[from] ?? {}, results[to] ?? {});
  const options = steps.map((s): [string, string] => [String(s), `step ${s}`]);
  const list = (ids: string[]): JSX.Element => (
    <p class="ids mono">{ids.slice(0, 60).map((id) => <a key={id} href={href("samples", { kind: "eval", step: String(to), group: id })}>{format.visible(id.slice(0, 12))}</a>)}{ids.length > 60 && <span>and {ids.length - 60} more</span>}{!ids.length && "none"}</p>
  );
  return (
    <Card class="wide" title="Held-out prompts gained and lost" sub={`of ${format.count(both)} that both evaluations asked`} tools={
      <span class="toolbar flat"><Choose label="from" value={String(from)} options={options} onChange={(v) => set({ eval_from: v })} /><Choose label="to" value={String(to)} options={options} onChange={(v) => set({ eval_to: v })} /></span>
    }>
      <div class="gained">
        <div><b>{gained.length}</b> gained{list(gained)}</div>
        <div><b>{lost.length}</b> lost{list(lost)}</div>
      </div>
    </Card>
  );
}

export function Learning(): JSX.Element {
  const opened = here();
  return (
    <>
      <ChartTools opened={[opened]} />
      <ChartGrid page="learning" opened={opened} />
      <section class="charts"><Gained run={opened.run.value} /></section>
    </>
  );
}
