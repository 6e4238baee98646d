"""Do they learn? Each algorithm on the demo task, from the same warm start, on a CPU.

    python bench/algorithms.py                            # seven algorithms, two seeds; some minutes each
    python bench/algorithms.py --only ppo grpo --seeds 0

The task is `trimtab demo`'s: a transformer of 0.9 million parameters sorts eight digits; right or wrong is the only reward. The
warm start is 60 supervised steps of seed 0; a seed is that of the reinforcement learning after it. Settings are the demo's (64
prompts x 8 samples, at most 10 tokens) over 100 steps, but for those in SETTINGS. Accuracy is greedy on 256 held-out lists, one
core a run. Goal: 0.85. GSPO gets two updates a step: with one, its ratio is 1 and it is GRPO, bit for bit.

Writes DIR/algorithms-DATE.json and .md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import trimtab
from trimtab import demo
from trimtab.data.tasks import TASKS
from trimtab.model.load import save_model
from trimtab.model.policy import Policy
from trimtab.record.jsonl import read_jsonl

DIFFICULTY, STEPS, WARM = 8, 100, 60
SETTINGS: dict[str, dict[str, Any]] = {
    "ppo": {"lr": 3e-4, "epochs_per_step": 2, "critic": {"lr": 1e-3, "warmup_steps": 5}},
    "grpo": {},
    "dr_grpo": {},
    "rloo": {},
    "reinforce_pp": {},
    "dapo": {},
    "gspo": {"updates_per_step": 2},
}


def warm_start(folder: Path, steps: int, difficulty: int = DIFFICULTY) -> None:
    tokenizer = demo.build_tokenizer()
    policy = Policy(demo.build_model(tokenizer, 0))
    rows = TASKS[demo.TASK].generate(demo.TRAIN_ROWS, difficulty, 0, "train")
    demo.warm_start(policy, tokenizer, rows, steps)
    save_model(policy.model, tokenizer, folder / "warm-start")


def learn(
    algorithm: str, seed: int, folder: Path, steps: int, start: Path | None = None, difficulty: int = DIFFICULTY, **sizes: Any
) -> dict[str, Any]:  # fmt: skip
    """One run in a folder, from the warm start there or in `start`; its accuracy before and after, and how long it took."""
    config = demo.demo_config(folder, difficulty, steps, seed)
    config["model"]["path"] = str((start or folder) / "warm-start")
    config["learn"] |= {"algorithm": algorithm, **SETTINGS[algorithm], **sizes}
    config["run"] = {"device": "cpu", "threads": 1}
    config["observe"] |= {"dir": str(folder / f"{algorithm}-{seed}"), "checkpoint_every": 0, "tensorboard": False}
    started = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        summary = trimtab.train(config)
    metrics = read_jsonl(Path(summary["run_dir"]) / "metrics.jsonl")
    explained = [row["value/explained_variance"] for row in metrics if "value/explained_variance" in row]
    found = {
        "algorithm": algorithm, "seed": seed, "before": summary["eval"]["before"], "after": summary["eval"]["after"],
        "curve": [(row["step"], row["eval/pass@1"]) for row in metrics if "eval/pass@1" in row],
        "rewards": [row["reward/mean"] for row in metrics if "reward/mean" in row],
        "seconds": round(time.monotonic() - started),
    }  # fmt: skip
    return found | ({"explained_variance": explained} if explained else {})


def report(found: list[dict[str, Any]]) -> str:
    lines = [
        f"# Algorithms on the demo task, {datetime.date.today()}", "",
        f"Held-out accuracy, greedy, after {STEPS} steps from the same warm start; two CPU cores, shared with other work.", "",
        "| algorithm | seed | before | after | seconds |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for row in found:
        lines.append(
            f"| `{row['algorithm']}` | {row['seed']} | {row['before']:.1%} | {row['after']:.1%} | {row['seconds']} |"
        )
    for row in found:
        if "explained_variance" in row:
            values = row["explained_variance"]
            ends = [sum(part) / len(part) for part in (values[:10], values[-10:])]
            first, last = (f"{value:.2f}" for value in ends)
            lines.append(
                f"\nPPO's critic, seed {row['seed']}: explained variance {first} over the first ten steps, {last} over the last."
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    name, found = args.out / f"algorithms-{datetime.date.today()}", []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        warm_start(Path(scratch), WARM)
        for seed in args.seeds:
            for algorithm in args.only:
                found.append(learn(algorithm, seed, Path(scratch), STEPS))
                print({key: found[-1][key] for key in ("algorithm", "seed", "before", "after", "seconds")}, flush=True)
                name.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
                name.with_suffix(".md").write_text(report(found))


if __name__ == "__main__":
    main()
