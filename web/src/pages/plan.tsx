// Plan and config: the config as a tree with where each value comes from, what Trimtab chose and why, and what other settings would take.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { here } from "../chart/card";
import type { Run } from "../data";
import * as format from "../format";
import { param, set } from "../route";
import { live } from "../store";
import { Card, Copy, Empty } from "../ui";
import { Explorer } from "./explorer";

const SOURCES = { you: "set by you", chosen: "chosen by Trimtab", default: "default" };

interface Node {
  name: string;
  leaf: Run["config"][number] | null;
  children: Map<string, Node>;
}

function treeOf(config: Run["config"]): Node {
  const root: Node = { name: "", leaf: null, children: new Map() };
  for (const entry of config) {
    let node = root;
    for (const part of entry.key.split(".")) {
      if (!node.children.has(part)) node.children.set(part, { name: part, leaf: null, children: new Map() });
      node = node.children.get(part)!;
    }
    node.leaf = entry;
  }
  return root;
}

function Branch({ node, depth }: { node: Node; depth: number }): JSX.Element {
  return (
    <ul class="tree">
      {[...node.children.values()].map((child) => (
        <li key={child.name}>
          {child.children.size ? (
            <details open={depth < 1 || param("config") !== null}><summary class="mono">{child.name}</summary><Branch node={child} depth={depth + 1} /></details>
          ) : (
            <div class={`leaf ${child.leaf!.source}`}>
              <span class="mono">{child.name}: <b>{format.json(child.leaf!.value)}</b></span>
              {child.leaf!.source !== "default" && <span class={`tag ${child.leaf!.source === "you" ? "" : "mut"}`}>{SOURCES[child.leaf!.source]}</span>}
              {child.leaf!.why && <span class="why">{child.leaf!.why}</span>}
            </div>
          )}
        </li>
      ))}
    </ul>
  );
}

function Config({ run }: { run: Run }): JSX.Element {
  const only = param("source") ?? "all";
  const q = (param("config") ?? "").toLowerCase();
  const shown = run.config.filter((c) => (only === "all" || c.source === only) && (!q || `${c.key} ${format.json(c.value)}`.toLowerCase().includes(q)));
  const counts = (s: string): number => run.config.filter((c) => c.source === s).length;
  return (
    <Card class="wide" title="Config">
      <div class="toolbar">
        <span class="segments" role="group" aria-label="source of values">
          {(["all", "you", "chosen", "default"] as const).map((s) => <button key={s} type="button" class="button" aria-pressed={only === s} onClick={() => set({ source: s === "all" ? null : s })}>{s === "all" ? `all ${run.config.length}` : `${SOURCES[s]} ${counts(s)}`}</button>)}
        </span>
        <input type="search" placeholder="search keys" aria-label="search keys" value={param("config") ?? ""} onInput={(e) => set({ config: e.currentTarget.value || null })} />
      </div>
      {shown.length ? <Branch node={treeOf(shown)} depth={0} /> : <Empty title="No key">{run.config.length ? "None is like that." : "The folder has no config.yaml that can be read."}</Empty>}
    </Card>
  );
}

function Choices({ run }: { run: Run }): JSX.Element | null {
  const choices = run.plan?.choices ?? [];
  if (!choices.length) return null;
  return (
    <Card class="wide" title="What Trimtab chose" sub={run.plan?.step_seconds ? `for a step of ${format.seconds(run.plan.step_seconds)}` : ""}>
      <div class="scroll-x"><table class="list"><thead><tr><th>key</th><th>value</th><th>why</th></tr></thead><tbody>{choices.map((c) => <tr key={c.key}><td class="mono nowrap">{c.key}</td><td class="mono">{format.json(c.value)}</td><td>{c.why}</td></tr>)}</tbody></table></div>
      {run.plan?.assumed ? <p class="note">Assumed: {typeof run.plan.assumed === "object" ? Object.entries(run.plan.assumed as object).map(([k, v]) => `${k} ${format.json(v)}`).join(", ") : format.json(run.plan.assumed)}</p> : null}
    </Card>
  );
}

function offerText(offer: Record<string, unknown> | string): string {
  if (typeof offer === "string") return offer;
  const words = offer.text ?? offer.words;
  if (words) return typeof offer.seconds === "number" ? `${words}: ${format.seconds(offer.seconds)} a step` : String(words);
  return String(Object.entries(offer).filter(([, v]) => typeof v !== "object").map(([k, v]) => `${k}: ${v}`).join(", "));
}

/** A report cannot compute: it holds the offers and ten single changes, computed when it was written. */
function Changes({ run }: { run: Run }): JSX.Element | null {
  const { changes = [], offers = [] } = run.plan ?? {};
  const picked = useSignal<string[]>([]);
  if (!changes.length && !offers.length) return live.value ? null : <Card class="wide" title="Other settings"><Empty title="Not computed">The planner had no plan of this run to start from. With trimtab serve, settings can be tried here.</Empty></Card>;
  const now = run.plan?.step_seconds ?? null;
  return (
    <Card class="wide" title="Other settings" sub="single changes, computed when this was written">
      {changes.length > 0 && (
        <div class="scroll-x"><table class="list"><thead><tr><th /><th>change</th><th class="num">a step</th><th class="num">against the plan</th><th class="num">peak</th><th>fits</th></tr></thead><tbody>
          {changes.map((c) => {
            const text = (c.overrides ?? []).join(" ");
            return (
              <tr key={c.text}>
                <td><input type="checkbox" aria-label={`pick ${c.text}`} checked={picked.value.includes(text)} onChange={(e) => (picked.value = e.currentTarget.checked ? [...picked.value, text] : picked.value.filter((t) => t !== text))} /></td>
                <td>{c.text} <span class="why mono">{text}</span></td><td class="num">{format.seconds(c.seconds)}</td>
                <td class="num">{c.seconds && now ? `${c.seconds >= now ? "+" : "\u2212"}${format.percent(Math.abs(c.seconds / now - 1), 0)}` : format.DASH}</td>
                <td class="num">{format.bytes(c.peak_bytes)}</td><td>{c.fits === null || c.fits === undefined ? format.DASH : c.fits ? "yes" : "no"}</td>
              </tr>
            );
          })}
        </tbody></table></div>
      )}
      {picked.value.length > 0 && <p class="toolbar">Copy as overrides <Copy text={picked.value.join(" ")} /></p>}
      {offers.length > 0 && <ul class="offers">{offers.map((o, k) => <li key={k}>{offerText(o)}</li>)}</ul>}
    </Card>
  );
}

export function PlanPage(): JSX.Element {
  const run = here().run.value;
  return (
    <section class="charts plan-page">
      {live.value && <Explorer run={run} />}
      <Changes run={run} />
      <Choices run={run} />
      <Config run={run} />
    </section>
  );
}
