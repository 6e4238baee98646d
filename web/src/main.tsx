// Starts the page: a report carries its data in the element "data", otherwise there is a server to ask.
import "uplot/dist/uPlot.min.css";
import "./style.css";
import "./pages.css";
import { render } from "preact";
import { App } from "./app";
import { reportSource, serverSource } from "./load";
import { failure, heads, source, watchAddress } from "./store";

async function start(): Promise<void> {
  const root = document.getElementById("app") ?? document.body.appendChild(document.createElement("div"));
  const data = document.getElementById("data");
  root.replaceChildren(); // the static first screen, for readers without scripts
  render(<App />, root);
  try {
    const found = data ? await reportSource(data) : await serverSource();
    heads.value = await found.heads();
    source.value = found;
    watchAddress();
  } catch (error) {
    failure.value = error instanceof Error ? error.message : String(error);
  }
}

void start();
