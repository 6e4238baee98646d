// The frame around every page: the strip at the top, the pages, help, keys.
import { signal } from "@preact/signals";
import type { JSX } from "preact";
import { useEffect, useRef } from "preact/hooks";
import { helpOpen } from "./chart/card";
import type { Run, State } from "./data";
import * as format from "./format";
import { AllMetrics } from "./pages/all";
import { ComparePage } from "./pages/compare";
import { Learning } from "./pages/learning";
import { Log } from "./pages/log";
import { MemoryPage } from "./pages/memory";
import { Overview } from "./pages/overview";
import { PlanPage } from "./pages/plan";
import { RunList } from "./pages/runs";
import { Speed } from "./pages/speed";
import { go, href, route, set } from "./route";
import { SamplesPage } from "./samples/page";
import { connected, current, failure, heads, live, page, runId, source } from "./store";
import { choice, choose, theme } from "./theme";
import { TimelinePage } from "./timeline/page";
import { Choose, Empty } from "./ui";

const PAGES: [string, string, () => JSX.Element][] = [
  ["overview", "Overview", Overview],
  ["learning", "Learning", Learning],
  ["speed", "Speed", Speed],
  ["memory", "Memory", MemoryPage],
  ["samples", "Samples", SamplesPage],
  ["timeline", "Timeline", TimelinePage],
  ["plan", "Plan and config", PlanPage],
  ["log", "Log", Log],
  ["metrics", "All metrics", AllMetrics],
];

export const STATE_LEVEL: Record<State["kind"], string> = {
  starting: "", running: "ok", quiet: "warn", failed: "bad", stopped: "warn", finished: "ok", unknown: "",
};

function Brand(): JSX.Element {
  return (
    <a class="brand" href={live.value ? "#/runs" : "#/overview"} aria-label="Trimtab">
      <svg viewBox="0 0 20 20" aria-hidden="true"><path d="M2 14.5 L11 3 L11 14.5 Z" class="b1" /><path d="M12.5 9.5 L18 14.5 L12.5 14.5 Z" class="b2" /></svg>
      <span>Trimtab</span>
    </a>
  );
}

function Pill({ run }: { run: Run }): JSX.Element {
  const kind = run.state.kind;
  return <span class={`pill ${STATE_LEVEL[kind]}`}><i />{kind === "unknown" ? "state unknown" : kind}</span>;
}

function ThemeSwitch(): JSX.Element {
  const next = theme.value === "dark" ? "light" : "dark";
  const systemHas = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  return (
    <button type="button" class="round" aria-label={`Switch to ${next}`} title={`${choice.value === "auto" ? "as the system: " : ""}${theme.value}; switch to ${next}`} onClick={() => choose(next === systemHas ? "auto" : next)}>
      <svg viewBox="0 0 16 16" aria-hidden="true"><circle cx="8" cy="8" r="6" fill="none" stroke="currentColor" stroke-width="1.5" /><path d="M8 2a6 6 0 0 1 0 12z" fill="currentColor" /></svg>
    </button>
  );
}

function Top(): JSX.Element {
  const run = current.value?.run.value;
  const several = heads.value.length > 1;
  const shown = page.value;
  return (
    <header class="top">
      <a class="skip" href="#main" onClick={(e) => (e.preventDefault(), document.getElementById("main")?.focus())}>Skip to content</a>
      <Brand />
      <nav aria-label="Pages">
        {live.value && <a href="#/runs" aria-current={shown === "runs" ? "page" : undefined}>Runs</a>}
        {several && <a href={href("compare")} aria-current={shown === "compare" ? "page" : undefined}>Compare</a>}
        {run && PAGES.map(([id, title]) => <a key={id} href={href(id)} aria-current={shown === id ? "page" : undefined}>{title}</a>)}
      </nav>
      <div class="right">
        {several && run && heads.value.length <= 200 && <Choose label="" value={run.id} options={heads.value.map((h) => [h.id, h.name])} onChange={(id) => set({ run: id, zoom: null })} />}
        {!connected.value && <span class="pill warn"><i />reconnecting</span>}
        {run && !several && <span class="whenat">{format.when(run.facts.ended_at ?? run.at ?? source.value?.written)}</span>}
        {run && <Pill run={run} />}
        <button type="button" class="round help" aria-label="Help and keys" title="help (?)" onClick={() => (helpOpen.value = true)}>?</button>
        <ThemeSwitch />
      </div>
    </header>
  );
}

function Help(): JSX.Element | null {
  const ref = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    if (helpOpen.value) ref.current?.showModal();
    else ref.current?.close();
  }, [helpOpen.value]);
  const rows: [string, string][] = [
    ["/", "search samples, or metrics on All metrics"], ["j  k", "next and previous group or sample"], ["\u2190 \u2192", "move the hover line of a focused chart"],
    ["drag", "zoom all charts; double click shows everything again"], ["?", "this help"],
  ];
  return (
    <dialog ref={ref} aria-label="Help" onClose={() => (helpOpen.value = false)}>
      <h3>Keys and charts</h3>
      <dl>{rows.map(([k, what]) => <><dt><kbd>{k}</kbd></dt><dd>{what}</dd></>)}</dl>
      <p class="note">Thin lines are raw values, thick ones smoothed; a shaded band is healthy; a red tick is a value that is not finite; a hairline is a resumed start. The address holds page, zoom and selection: copy it to show what you see.</p>
      <p class="toolbar"><button type="button" class="button" autofocus onClick={() => (helpOpen.value = false)}>Close</button></p>
    </dialog>
  );
}

/** Keys that work on every page; a page adds its own by listening itself. */
function keys(e: KeyboardEvent): void {
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test((e.target as HTMLElement).tagName);
  if (typing || e.ctrlKey || e.metaKey || e.altKey) return;
  if (e.key === "?") (helpOpen.value = true), e.preventDefault();
  if (e.key === "/") {
    e.preventDefault();
    const focus = (): void => document.querySelector<HTMLInputElement>("input[type=search]")?.focus();
    if (document.querySelector("input[type=search]")) focus();
    else if (current.value) go("samples"), setTimeout(focus, 60);
  }
}

const titled = signal("");

function Body(): JSX.Element {
  if (failure.value) return <Empty title="This cannot be shown">{failure.value}</Empty>;
  if (!source.value) return <Empty title="Opening" />;
  if (page.value === "runs") return <RunList />;
  if (page.value === "compare") return <ComparePage />;
  if (!runId.value) return <Empty title="No run is chosen">Choose one from the <a href="#/runs">list of runs</a>.</Empty>;
  if (!current.value) return <Empty title={`Opening ${runId.value}`} />;
  const Page = PAGES.find(([id]) => id === page.value)?.[2] ?? Overview;
  return <Page />;
}

export function App(): JSX.Element {
  useEffect(() => {
    addEventListener("keydown", keys);
    return () => removeEventListener("keydown", keys);
  }, []);
  document.documentElement.dataset.theme = theme.value;
  const run = current.value?.run.value;
  titled.value = run ? `${run.name} \u00b7 Trimtab` : "Trimtab";
  useEffect(() => void (document.title = titled.value), [titled.value]);
  useEffect(() => scrollTo(0, 0), [route.value.page]);
  return (
    <>
      <Top />
      <main id="main" tabIndex={-1} data-page={page.value}>
        <Body />
      </main>
      <Help />
    </>
  );
}
