// One sample: the conversation, its reward in parts, what it was compared with, how it ended.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import type { Sample, Turn } from "../data";
import * as format from "../format";
import { Text } from "./text";

function Rewards({ rewards }: { rewards: Record<string, number | null> }): JSX.Element {
  const entries = Object.entries(rewards);
  const most = Math.max(1, ...entries.map(([, v]) => Math.abs(v ?? 0)));
  return (
    <table class="parts"><tbody>
      {entries.map(([name, v]) => (
        <tr key={name}><td>{format.visible(name)}</td><td><div class="funnel-bar"><i class="c-metric" style={{ width: `${(100 * Math.abs(v ?? 0)) / most}%`, opacity: (v ?? 0) < 0 ? "0.5" : "1" }} /></div></td><td class="num">{v === null ? "none" : format.number(v)}</td></tr>
      ))}
    </tbody></table>
  );
}

function TurnView({ turn, last, markdown }: { turn: Turn; last: boolean; markdown: boolean }): JSX.Element {
  const calls = turn.tool_calls ? JSON.stringify(turn.tool_calls, null, 1) : null;
  const tool = turn.role === "tool" || !!calls || /<tool_call>/.test(turn.content ?? "");
  return (
    <details class={`turn ${tool ? "tool" : ""}`} open={last}>
      <summary><b>{format.visible(String(turn.role))}</b>{tool && <span class="tag mut">tool</span>}<span>{format.visible(String(turn.content ?? "").trim().slice(0, 90))}</span></summary>
      <Text text={String(turn.content ?? "")} markdown={markdown} />
      {calls && <pre class="md-code mono">{format.visible(calls)}</pre>}
    </details>
  );
}

export function SampleView({ row, heading }: { row: Sample; heading?: string }): JSX.Element {
  const markdown = useSignal(false);
  const facts: [string, string][] = [
    ["reward", format.number(row.reward)], ["advantage", format.number(row.advantage)], ["group's mean", format.number(row.group_mean)], ["ended by", format.visible(row.finish ?? format.DASH)],
    ["tokens", `${format.count(row.tokens)}${row.prompt_tokens ? ` after ${format.count(row.prompt_tokens)}` : ""}`], ["chosen as", format.visible(row.chosen ?? format.DASH)],
  ];
  return (
    <div class="sample">
      <div class="card-head"><h3>{heading ?? `Sample ${row.sample}`} <span>{format.visible(`${row.prompt_id}${row.task ? `, ${row.task}` : ""}`)}</span></h3><span class="readout" /><button type="button" class="button" aria-pressed={markdown.value} onClick={() => (markdown.value = !markdown.value)}>Markdown</button></div>
      <dl class="sample-facts">{facts.filter(([, v]) => v !== format.DASH).map(([k, v]) => <div key={k}><dt>{k}</dt><dd>{v}</dd></div>)}</dl>
      {row.rewards && Object.keys(row.rewards).length > 0 && <Rewards rewards={row.rewards} />}
      {row.failure && <div class="alert bad"><b>Failed</b> <Text text={String(row.failure)} /></div>}
      {row.turns?.length ? (
        row.turns.map((turn, k) => <TurnView key={k} turn={turn} last={k >= row.turns!.length - 2} markdown={markdown.value} />)
      ) : (
        <>
          <h4>prompt</h4><Text text={row.prompt ?? ""} markdown={markdown.value} />
          <h4>completion</h4><Text text={row.completion ?? ""} markdown={markdown.value} />
        </>
      )}
      {row.answer !== null && row.answer !== undefined && row.answer !== "" && <><h4>expected answer</h4><Text text={format.json(row.answer)} /></>}
    </div>
  );
}
