"""Does it still learn from older samples? GRPO on the demo task with samples 0, 1 and 4 steps old, corrected for and not.

    python bench/staleness.py                    # five runs from one warm start, on a CPU
    python bench/staleness.py --steps 100 --lr 1e-3

The task is `trimtab demo`'s: a transformer of 0.9 million parameters sorts digits; right or wrong is the only reward. Corrected
is `learn.importance.level: token`, which is what `auto` means above staleness 0; not corrected is `off`. Accuracy is greedy on
256 held-out lists. Prompts and random numbers are the same in all runs, so the first k + 1 batches are, too.

Writes DIR/staleness-DATE.json, .md and .png (with matplotlib).
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

DIFFICULTY, WARM = 6, 40
CASES = [(0, "auto"), (1, "auto"), (1, "off"), (4, "auto"), (4, "off")]
COLORS = {0: "black", 1: "tab:blue", 4: "tab:red"}


def warm_start(folder: Path) -> None:
    tokenizer = demo.build_tokenizer()
    policy = Policy(demo.build_model(tokenizer, 0))
    rows = TASKS[demo.TASK].generate(demo.TRAIN_ROWS, DIFFICULTY, 0, "train")
    demo.warm_start(policy, tokenizer, rows, WARM)
    save_model(policy.model, tokenizer, folder / "warm-start")


def learn(staleness: int, level: str, folder: Path, steps: int, lr: float) -> dict[str, Any]:
    config = demo.demo_config(folder, DIFFICULTY, steps, 0)
    config["learn"] |= {"staleness": staleness, "importance": {"level": level}, "prompts_per_step": 32, "lr": lr}
    config["run"] = {"device": "cpu", "threads": 1}
    name = f"staleness-{staleness}-{level}"
    config["observe"] |= {
        "dir": str(folder / name), "checkpoint_every": 0, "eval_every": 10, "tensorboard": False, "report": False,
    }  # fmt: skip
    started = time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()):
        summary = trimtab.train(config)
    metrics = read_jsonl(Path(summary["run_dir"]) / "metrics.jsonl")
    gaps = [row["rollout/stale_gap"] for row in metrics if "rollout/stale_gap" in row]
    return {
        "staleness": staleness, "corrected": level == "auto" and staleness > 0,
        "before": summary["eval"]["before"], "after": summary["eval"]["after"],
        "curve": [(row["step"], row["eval/pass@1"]) for row in metrics if "eval/pass@1" in row],
        "stale_gap": sum(gaps) / len(gaps) if gaps else None,
        "seconds": round(time.monotonic() - started),
    }  # fmt: skip


def words(row: dict[str, Any]) -> str:
    if not row["staleness"]:
        return "0"
    return f"{row['staleness']}, {'corrected' if row['corrected'] else 'not corrected'}"


def report(found: list[dict[str, Any]], steps: int, lr: float) -> str:
    lines = [
        f"# Learning from older samples, {datetime.date.today()}", "",
        f"Demo task, {DIFFICULTY} digits, GRPO, {steps} steps of 32 prompts × 8 samples, lr {lr:g}, one seed. Greedy accuracy "
        "on 256 held-out lists. One seed says little of differences of a few percent.", "",
        "| learn.staleness | before | after | mean gap of log-probs to the sampling policy |", "|---|---|---|---|",
    ]  # fmt: skip
    for row in found:
        gap = "" if row["stale_gap"] is None else f"{row['stale_gap']:.4f}"
        lines.append(f"| {words(row)} | {row['before']:.1%} | {row['after']:.1%} | {gap} |".replace("%", " %"))
    return "\n".join(lines) + "\n"


def draw(found: list[dict[str, Any]], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for row in found:
        steps, values = zip(*row["curve"])
        style = "-" if row["corrected"] or not row["staleness"] else "--"
        axes.plot(steps, values, style, color=COLORS[row["staleness"]], label=f"staleness {words(row)}")
    axes.set(xlabel="step", ylabel="held-out accuracy")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    name, found = args.out / f"staleness-{datetime.date.today()}", []
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        warm_start(Path(scratch))
        for staleness, level in CASES:
            found.append(learn(staleness, level, Path(scratch), args.steps, args.lr))
            print({key: found[-1][key] for key in ("staleness", "corrected", "before", "after", "seconds")}, flush=True)
            name.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
            name.with_suffix(".md").write_text(report(found, args.steps, args.lr))
    with contextlib.suppress(ImportError):
        draw(found, name.with_suffix(".png"))


if __name__ == "__main__":
    main()
