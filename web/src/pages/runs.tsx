// The list of runs, where there is a server: only rows in view are drawn, so a folder of thousands stays quick.
import { useSignal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import type { RunHead } from "../data";
import * as format from "../format";
import { param, set } from "../route";
import { chooseRuns, chosen, heads, MOST_RUNS, source } from "../store";
import { Empty, LevelMark, VirtualList } from "../ui";

const REFRESH_MS = 5000;

const COLUMNS: [string, (h: RunHead) => number | string | null, (h: RunHead) => string][] = [
  ["run", (h) => h.name, (h) => h.name],
  ["state", (h) => h.state.kind, (h) => h.state.kind],
  ["steps", (h) => h.facts.step, (h) => (h.facts.step === null ? format.DASH : `${format.count(h.facts.step)}${h.facts.steps ? ` of ${format.count(h.facts.steps)}` : ""}`)],
  ["score", (h) => h.last.score, (h) => (h.last.score === null ? format.DASH : format.percent(h.last.score, 1))],
  ["reward", (h) => h.last.reward, (h) => format.number(h.last.reward)],
  ["a step", (h) => h.last.seconds_a_step, (h) => format.seconds(h.last.seconds_a_step)],
  ["peak", (h) => h.last.peak_gib, (h) => (h.last.peak_gib === null ? format.DASH : `${format.number(h.last.peak_gib)} GiB`)],
  ["changed", (h) => h.at, (h) => format.when(h.at)],
];

export function RunList(): JSX.Element {
  const sort = useSignal<{ by: number; down: boolean }>({ by: COLUMNS.length - 1, down: true });
  useEffect(() => {
    const timer = setInterval(() => void source.value?.heads().then((found) => (heads.value = found), () => {}), REFRESH_MS);
    return () => clearInterval(timer);
  }, []);
  const q = (param("name") ?? "").toLowerCase();
  const key = COLUMNS[sort.value.by][1];
  const shown = heads.value
    .filter((h) => `${h.name} ${h.facts.task ?? ""} ${h.state.kind}`.toLowerCase().includes(q))
    .sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      const order = x === null ? 1 : y === null ? -1 : typeof x === "number" && typeof y === "number" ? x - y : String(x).localeCompare(String(y));
      return sort.value.down && x !== null && y !== null ? -order : order;
    });
  const picked = chosen.value;
  const toggle = (id: string, on: boolean): void => chooseRuns(on ? [...picked, id] : picked.filter((p) => p !== id));
  return (
    <>
      <h1>Runs</h1>
      <div class="toolbar">
        <input type="search" placeholder="search runs" aria-label="search runs" value={param("name") ?? ""} onInput={(e) => set({ name: e.currentTarget.value || null })} />
        <span>{shown.length === heads.value.length ? format.plural(shown.length, "run") : `${shown.length} of ${format.plural(heads.value.length, "run")}`}</span>
        <span class="grow" />
        {picked.length > 0 && <span>{picked.length} of at most {MOST_RUNS} chosen</span>}
        <a class={`button ${picked.length < 2 ? "off" : ""}`} href={picked.length < 2 ? undefined : `#/compare?runs=${picked.map(encodeURIComponent).join(",")}`} aria-disabled={picked.length < 2}>Compare</a>
      </div>
      <section class="card run-list">
        {heads.value.length ? (
          <>
            <div class="run-row head">
              <span /><span />
              {COLUMNS.map(([name], k) => <button key={name} type="button" class={sort.value.by === k ? "on" : ""} onClick={() => (sort.value = { by: k, down: sort.value.by === k ? !sort.value.down : k > 1 })}>{name}{sort.value.by === k ? (sort.value.down ? " \u2193" : " \u2191") : ""}</button>)}
            </div>
            <VirtualList count={shown.length} row={38} height={Math.max(300, innerHeight - 230)} label="runs" render={(k) => {
              const h = shown[k];
              return (
                <div key={h.id} class="run-row">
                  <span><input type="checkbox" aria-label={`compare ${h.name}`} checked={picked.includes(h.id)} disabled={picked.length >= MOST_RUNS && !picked.includes(h.id)} onChange={(e) => toggle(h.id, e.currentTarget.checked)} /></span>
                  <span><LevelMark level={h.level} /></span>
                  {COLUMNS.map(([name, , text], n) => n === 0 ? <a key={name} href={`#/overview?run=${encodeURIComponent(h.id)}`} title={h.facts.task ?? undefined}>{text(h)}</a> : <span key={name} title={n === 1 ? h.state.text : undefined}>{text(h)}</span>)}
                </div>
              );
            }} />
          </>
        ) : <Empty title="No runs">The folder holds none yet. A run appears here as soon as it has written its config.</Empty>}
      </section>
    </>
  );
}
