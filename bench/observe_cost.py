"""What it costs to observe a run: pairs of runs with and without observation, and the share that runs measure themselves.

    python bench/observe_cost.py [--pairs 10] [--steps 20] [--model FOLDER] [--out FILE.md]

"Without" leaves out what is observed besides the row of metrics: no pulse, no trace of what is done within phases, no
distributions, no samples, no meters. The two runs of a pair follow each other, in alternating order, and the ratio is of the
medians of their steps, in seconds and in processor seconds. Without --model a small random Llama is trained on arithmetic.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

RUN = """
import json, sys
spec = json.loads(sys.argv[1])
import torch
torch.set_num_threads(spec["threads"])
import trimtab
if not spec["observed"]:
    from trimtab.base import spans
    from trimtab.observe import journal, observer, timeline
    from trimtab.observe.pulse import Pulse
    from trimtab.observe.process_memory import HostPeaks
    Pulse.start = lambda self: None
    spans.SpanLog.add = lambda self, *a, **k: None
    spans.SpanLog.count = lambda self, *a, **k: None
    HostPeaks._sample = lambda self: 0
    observer.LocalObserver._write_samples = lambda self, *a: None
    observer.LocalObserver.distributed = lambda self, row: None
    import trimtab.run.update_step as update_step
    update_step._spread = lambda run, groups: {}
    update_step._note_advantages = lambda batch: None
import trimtab.observe.look_back
trimtab.observe.look_back.draw_curve = lambda folder, console: None
rows = []
import time
trimtab.train(callbacks=[lambda step, metrics: rows.append({**metrics, "cpu": time.process_time()})], **spec["arguments"])
print("ROWS " + json.dumps(rows))
"""


def make_model(folder: Path) -> Path:
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from tiny import tiny_model, tiny_tokenizer

    from trimtab.model.load import save_model

    model = tiny_model("llama", hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
    save_model(model, tiny_tokenizer(), folder)
    return folder


def one(model: Path, folder: Path, steps: int, observed: bool, threads: int) -> list[dict[str, float]]:
    arguments: dict[str, Any] = {
        "model": str(model),
        "data": {"train": "task:arithmetic"},
        "reward": [{"fn": "task"}],
        "learn": {"steps": steps, "prompts_per_step": 16, "samples_per_prompt": 8, "max_new_tokens": 32, "lr": 1e-5},
        "run": {"threads": threads, "reward_workers": 1},
        "observe": {"dir": str(folder), "tensorboard": False, "checkpoint_every": 0},
    }
    spec = {"observed": observed, "arguments": arguments, "threads": threads}
    done = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(spec)], env={**os.environ}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    line = next(line for line in done.stdout.splitlines() if line.startswith("ROWS "))
    rows: list[dict[str, float]] = json.loads(line.removeprefix("ROWS "))
    return rows


def seconds(rows: list[dict[str, float]], skip: int = 2) -> float:
    """The median step; the first ones warm up, and the last waits for its checkpoint."""
    return statistics.median(row["time/total"] for row in rows[skip:])


def processor_seconds(rows: list[dict[str, float]], skip: int = 2) -> float:
    """The median step's, of all threads of the process: what else the machine does hardly changes it."""
    return statistics.median(b["cpu"] - a["cpu"] for a, b in pairwise(rows[skip - 1 :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        model = asked.model or make_model(Path(home) / "model")
        ratios, processor, shares, steps_s = [], [], [], []
        for pair in range(asked.pairs):
            found = {}
            for observed in (True, False) if pair % 2 else (False, True):
                folder = Path(home) / f"{pair}-{observed}"
                found[observed] = one(model, folder, asked.steps, observed, asked.threads)
            rows = found[True][2:]
            shares.append(sum(row["time/observe"] for row in rows) / sum(row["time/total"] for row in rows))
            ratios.append(seconds(found[True]) / seconds(found[False]))
            processor.append(processor_seconds(found[True]) / processor_seconds(found[False]))
            steps_s.append(seconds(found[True]))
            told = f"with/without {ratios[-1]:.4f}, processor time {processor[-1]:.4f}, observe {shares[-1]:.3%}"
            print(f"pair {pair + 1}: step {steps_s[-1]:.3f} s, {told}", flush=True)
    spread = statistics.stdev(processor) / len(processor) ** 0.5 if len(processor) > 1 else float("nan")
    lines = [
        "| | |",
        "|---|---|",
        f"| pairs, steps of each run | {asked.pairs}, {asked.steps} |",
        f"| a step | {statistics.median(steps_s):.2f} s |",
        f"| with over without, seconds of a step, median of pairs | {statistics.median(ratios):.4f} |",
        f"| the same, processor seconds | {statistics.median(processor):.4f} (standard error of the mean {spread:.4f}) |",
        f"| `time/observe` of `time/total`, median of runs | {statistics.median(shares):.2%} (highest {max(shares):.2%}) |",
    ]
    print("\n".join(lines))
    if asked.out:
        asked.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
