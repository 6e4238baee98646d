"""What moments of 8 bits change: on the demo task, against full ones and against what changes nothing.

    python bench/eight_bit.py                   # a quarter of an hour on one core
    python bench/eight_bit.py --no-rl           # without the runs of GRPO

Supervised steps from one random start (`trimtab demo`'s model and task), then GRPO from one warm start as in algorithms.py.
Beside 8-bit moments: another token budget, which only adds floats in another order, and learning rates 3 % apart. `apart` is
the distance between two sets of weights over the way that the first has come.

Writes DIR/eight_bit-DATE.json and .md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from pathlib import Path
from typing import Any

import algorithms
import torch

from trimtab import demo
from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.data.tasks import TASKS
from trimtab.model.policy import Policy
from trimtab.update.objectives.likelihood import Likelihood
from trimtab.update.updater import Updater

STEPS, BATCH, RATE = 100, 64, 2e-3
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "full, another token budget": {"budget": 512},
    "8bit": {"states": "8bit"},
    "full, rate 3 % higher": {"factor": 1.03},
    "full, rate 3 % lower": {"factor": 0.97},
}


def supervised(states: str = "full", budget: int = 4096, factor: float = 1.0) -> dict[str, Any]:
    """Losses, weights as they come, and the bytes of the optimizer's state."""
    tokenizer = demo.build_tokenizer()
    policy = Policy(demo.build_model(tokenizer, 0))
    learn = resolve(Learn(loss="on_policy", aggregate="token_mean", optimizer={"states": states}))
    sizes = {"token_budget": budget, "score_token_budget": budget, "logprob_chunk": budget}
    updater = Updater(policy, Likelihood(), learn, **sizes, checkpoint_activations=False)
    rows = TASKS[demo.TASK].generate(demo.TRAIN_ROWS, 4, 0, "train")
    losses, weights = [], [flat(policy)]
    for step in range(STEPS):
        samples = demo.supervised_batch(tokenizer, rows[step * BATCH % len(rows) :][:BATCH])
        rate = factor * RATE * min(1.0, (step + 1) / 10)
        losses.append(float(updater.step(samples, rate, 0.0).sums["loss"]))
        if step + 1 in (1, 10, 20, STEPS):
            weights.append(flat(policy))
    return {"losses": losses, "weights": weights, "state_bytes": updater.optimizer.state_bytes}


def flat(policy: Policy) -> torch.Tensor:
    return torch.cat([p.detach().flatten().clone() for p in policy.model.parameters()])


def compare() -> list[dict[str, Any]]:
    found, first = [], None
    for name, settings in VARIANTS.items():
        made = supervised(**settings)
        first = first or made
        start, *there = first["weights"]
        apart = [float((b - a).norm() / (a - start).norm()) for a, b in zip(there, made["weights"][1:])]
        row = {
            "moments": name, "state_bytes": made["state_bytes"], "apart": apart,
            "loss": [sum(made["losses"][at - 10 : at]) / 10 for at in (20, 60, STEPS)],
        }  # fmt: skip
        found.append(row)
        print(row, flush=True)
    return found


def report(found: list[dict[str, Any]], learned: list[dict[str, Any]]) -> str:
    lines = [
        f"# Moments of 8 bits on the demo task, {datetime.date.today()}", "",
        f"{STEPS} supervised steps, one core, float32. Loss: mean of the ten steps up to that one.", "",
        f"| moments | state, MiB | apart after 1, 10, 20, {STEPS} steps | loss at 20 | at 60 | at {STEPS} |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for row in found:
        apart = ", ".join(f"{value:.1e}" for value in row["apart"])
        losses = " | ".join(f"{value:.4f}" for value in row["loss"])
        lines.append(f"| {row['moments']} | {row['state_bytes'] / 2**20:.2f} | {apart} | {losses} |")
    if learned:
        lines += ["", f"GRPO, {algorithms.STEPS} steps from one warm start; held-out accuracy.", ""]
        lines += ["| moments | seed | before | after |", "|---|---|---|---|"]
        lines += [f"| {row['states']} | {row['seed']} | {row['before']:.1%} | {row['after']:.1%} |" for row in learned]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-rl", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    name, learned = args.out / f"eight_bit-{datetime.date.today()}", []
    found = compare()
    with tempfile.TemporaryDirectory() as scratch:
        if not args.no_rl:
            algorithms.warm_start(Path(scratch), algorithms.WARM)
        for seed in [] if args.no_rl else args.seeds:
            for states in ("full", "8bit"):
                folder = Path(scratch) / states
                folder.mkdir(exist_ok=True)
                made = algorithms.learn(
                    "grpo", seed, folder, algorithms.STEPS, start=Path(scratch), optimizer={"states": states}
                )
                learned.append({"states": states, **made})
                print({key: learned[-1][key] for key in ("states", "seed", "before", "after")}, flush=True)
                write(name, found, learned)
    write(name, found, learned)


def write(name: Path, found: list[dict[str, Any]], learned: list[dict[str, Any]]) -> None:
    name.with_suffix(".json").write_text(json.dumps({"supervised": found, "grpo": learned}, indent=1) + "\n")
    name.with_suffix(".md").write_text(report(found, learned))


if __name__ == "__main__":
    main()
