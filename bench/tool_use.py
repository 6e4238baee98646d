"""Does it learn to use a tool? The calculator example, on a CPU, with the tool and without.

    python bench/tool_use.py                    # some minutes
    python bench/tool_use.py --seeds 0 1 2

The task is products of two three-digit numbers; right or wrong is the only reward. The model (0.9 million parameters) starts from
examples/calculator/warm_start.py, seed 0; a seed is that of the reinforcement learning after it, with the settings of
examples/calculator/calculator.yaml. `without` is the same run with no environment: a tool call is just a wrong answer there.
Accuracy is greedy on 256 held-out products; calls are tool calls a completion while sampling, at the first and the last step.

Writes DIR/tool_use-DATE.json and .md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import io
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import trimtab
from trimtab.record.jsonl import read_jsonl

EXAMPLE = Path(__file__).parents[1] / "examples" / "calculator"


def warm_start(folder: Path) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("warm_start", EXAMPLE / "warm_start.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    started = time.monotonic()
    losses = module.make(folder)
    return {"steps": len(losses), "loss": losses[-1], "seconds": round(time.monotonic() - started)}


def learn(start: Path, folder: Path, seed: int, with_tool: bool) -> dict[str, Any]:
    overrides = [
        f"model.path={start}",
        f"observe.dir={folder}",
        f"learn.seed={seed}",
        "observe.tensorboard=false",
        "run.threads=1",
    ]
    overrides += [] if with_tool else ["environment=null"]
    started = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        summary = trimtab.train(EXAMPLE / "calculator.yaml", overrides=overrides)
    rows = read_jsonl(folder / "metrics.jsonl")
    steps = [row for row in rows if row["step"]]
    calls = [row["environment/tool_calls"] for row in steps if "environment/tool_calls" in row]
    return {
        "seed": seed, "tool": with_tool, "before": summary["eval"]["before"], "after": summary["eval"]["after"],
        "reward_first": summary["reward_first"], "reward_last": summary["reward_last"], "steps": summary["steps"],
        "calls_first": calls[0] if calls else 0.0, "calls_last": calls[-1] if calls else 0.0,
        "curve": [(row["step"], row["eval/pass@1"]) for row in rows if "eval/pass@1" in row],
        "rewards": [row["reward/mean"] for row in steps], "seconds": round(time.monotonic() - started),
    }  # fmt: skip


def report(start: dict[str, Any], found: list[dict[str, Any]]) -> str:
    lines = [
        f"# A calculator, learned, {datetime.date.today()}", "",
        "Held-out accuracy on products of three-digit numbers, greedy, 256 of them, after "
        f"{found[0]['steps']} steps of GRPO from a warm start of {start['steps']} supervised steps ({start['seconds']} s). One "
        f"thread of a machine with {os.cpu_count()} cores, shared with other work.", "",
        "| seed | tool | before | after | tool calls a completion, first and last step | seconds |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in found:
        tool = "calculator" if row["tool"] else "without"
        calls = f"{row['calls_first']:.2f}, {row['calls_last']:.2f}" if row["tool"] else "-"
        lines.append(
            f"| {row['seed']} | {tool} | {row['before']:.1%} | {row['after']:.1%} | {calls} | {row['seconds']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    name, found = args.out / f"tool_use-{datetime.date.today()}", []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        start = warm_start(Path(scratch) / "start")
        for seed, with_tool in [*((seed, True) for seed in args.seeds), (args.seeds[0], False)]:
            found.append(learn(Path(scratch) / "start", Path(scratch) / f"{seed}-{with_tool}", seed, with_tool))
            print({key: found[-1][key] for key in ("seed", "tool", "before", "after", "seconds")}, flush=True)
            name.with_suffix(".json").write_text(json.dumps({"warm_start": start, "runs": found}, indent=1) + "\n")
            name.with_suffix(".md").write_text(report(start, found))


if __name__ == "__main__":
    main()
