"""Does it learn? Real weights, real tasks, held-out accuracy before and after, within ten minutes on one GPU.

    python bench/real_learning.py gsm8k --model smollm2.gguf --data FOLDER     # with GSM8K's train.jsonl and test.jsonl
    python bench/real_learning.py chain_sum --model smollm2.gguf               # needs reasoning_gym, or --rows from --prepare
    python bench/real_learning.py chain_sum --prepare ROWS                     # write the task's rows and stop

gsm8k: SmolLM2-135M-Instruct answers one question in a hundred, too few to learn from, so it first reads the training split's
worked answers (--supervised passes over it, without the calculator's marks); then GRPO on the same questions with a right final
number as the only reward. chain_sum: reasoning_gym's sums and differences of two to four numbers, GRPO from the start.

Accuracy is greedy pass@1 on questions that no training saw: all of GSM8K's test split, 500 sums. Intervals are Wilson's, 95 %.
Everything but the keys below is left to Trimtab. Writes DIR/TASK.json, DIR/TASK.md and, where matplotlib is there, DIR/TASK.png.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NUMBER = "number_match"
CHAIN_SUM = {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 3}
TASKS: dict[str, dict[str, Any]] = {
    "gsm8k": {
        "data": {"prompt": "question", "suffix": "\nThink step by step. End with '#### ' and the final number."},
        "learn": {"steps": 120, "prompts_per_step": 64, "samples_per_prompt": 16, "max_new_tokens": 320, "lr": 1e-5},
        "eval_every": 20,
    },
    "chain_sum": {
        "data": {"prompt": "prompt", "suffix": "\nAnswer with the number alone."},
        "learn": {"steps": 300, "prompts_per_step": 128, "samples_per_prompt": 16, "max_new_tokens": 48, "lr": 1e-5},
        "eval_every": 30,
    },
}


def rows_of(task: str, args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training rows and held-out rows."""
    if task == "gsm8k":
        return tuple(_lines(Path(args.data) / f"{split}.jsonl") for split in ("train", "test"))  # type: ignore[return-value]
    if args.rows:
        return _lines(Path(args.rows) / "train.jsonl"), _lines(Path(args.rows) / "eval.jsonl")
    from trimtab.data.gym import load_reasoning_gym

    options = CHAIN_SUM | {"size": 20_000, "eval_size": 500}
    made = [load_reasoning_gym(task, split=s, limit=None, options=options, seed=0) for s in ("train", "eval")]
    return tuple([{key: row[key] for key in ("prompt", "answer")} for row in rows] for rows in made)  # type: ignore[return-value]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_answers(folder: Path, out: Path, rows: list[dict[str, Any]], task: str, passes: int) -> dict[str, Any]:
    """Supervised passes over worked answers, through the same update as GRPO's; saves the model to `out`."""
    import torch

    from trimtab.config.algorithms import resolve
    from trimtab.config.learn import Learn
    from trimtab.config.schema import Data, Model
    from trimtab.data.encode import PromptEncoder
    from trimtab.model.kernel_choice import fuse
    from trimtab.model.load import load_model, load_tokenizer, save_model
    from trimtab.model.policy import Policy
    from trimtab.update.batch import Sample
    from trimtab.update.objectives.likelihood import Likelihood
    from trimtab.update.updater import Updater

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    source = Model(path=str(folder))
    tokenizer, policy = load_tokenizer(source), Policy(load_model(source, device))
    fuse(policy)
    encoder = PromptEncoder(Data(train="object:rows", **TASKS[task]["data"]), tokenizer, task)
    prompts = encoder.encode(range(len(rows)), rows)
    answers = [re.sub(r"<<.*?>>", "", row["answer"]) for row in rows]
    tokens = [torch.tensor([*ids, tokenizer.eos_token_id]) for ids in tokenizer(answers).input_ids]
    batch, rate = 64, 2e-5
    steps = passes * len(rows) // batch
    learn = resolve(Learn(loss="on_policy", aggregate="token_mean", lr=rate, steps=steps))
    updater = Updater(
        policy,
        Likelihood(),
        learn,
        token_budget=16384,
        score_token_budget=16384,
        logprob_chunk=2048,
        checkpoint_activations=False,
    )
    order = [i for n in range(passes) for i in random.Random(n).sample(range(len(rows)), len(rows))]
    losses, started = [], time.monotonic()
    for step in range(steps):
        chosen = order[step * batch : (step + 1) * batch]
        total = sum(len(tokens[i]) for i in chosen)
        samples = [
            Sample(
                prompts[i].tokens,
                tokens[i],
                advantages=torch.ones(len(tokens[i])),
                weights=torch.full((len(tokens[i]),), 1 / total),
                engine_logprobs=torch.zeros(len(tokens[i])),
            )
            for i in chosen
        ]
        now = rate * min(1.0, (step + 1) / 20) * (0.1 + 0.9 * (1 - step / steps))
        losses.append(float(updater.step(samples, now, 0.0).sums["loss"]))
    save_model(policy.model, tokenizer, out)
    return {
        "passes": passes,
        "steps": steps,
        "loss_first": losses[0],
        "loss_last": statistics.mean(losses[-10:]),
        "seconds": time.monotonic() - started,
    }


def wilson(share: float, count: int, z: float = 1.96) -> tuple[float, float]:
    """Interval for a share seen in `count` trials."""
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return middle - half, middle + half


def report(found: dict[str, Any]) -> str:
    count = found["held_out"]
    (first, before), (last, after) = found["accuracy"][0], found["accuracy"][-1]

    def words(share: float) -> str:
        low, high = wilson(share, count)
        return f"{100 * share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"

    lines = [f"# {found['task']}, {found['machine']}, {found['date']}", "", f"`{found['command']}`", ""]
    if "base" in found:
        lines.append(f"- as it came: {words(found['base'])}")
    if "supervised" in found:
        s = found["supervised"]
        lines.append(
            f"- supervised: {s['passes']} passes, {s['steps']} steps, loss {s['loss_first']:.2f} to {s['loss_last']:.2f} "
            f"nats a token, {s['seconds']:.0f} s"
        )
    lines += [
        f"- before GRPO (step {first}): {words(before)}",
        f"- after {last} steps: {words(after)}",
        f"- {count} held-out questions, greedy; {found['seconds']:.0f} s of GRPO with its evaluations, "
        f"{found['tokens']:,} completion tokens",
        "",
        "| step | held-out accuracy |",
        "|---|---|",
        *(f"| {step} | {100 * share:.1f} % |" for step, share in found["accuracy"]),
    ]
    return "\n".join(lines) + "\n"


def draw(found: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    figure, axis = pyplot.subplots(figsize=(7, 4))
    axis.plot(range(1, len(found["reward"]) + 1), found["reward"], color="#bbb", lw=1, label="reward, training samples")
    steps, shares = zip(*found["accuracy"])
    bars = [
        [s - wilson(s, found["held_out"])[0] for s in shares],
        [wilson(s, found["held_out"])[1] - s for s in shares],
    ]
    axis.errorbar(steps, shares, yerr=bars, marker="o", capsize=3, color="#1f77b4", label="held-out accuracy, greedy")
    axis.set(xlabel="step", ylim=(0, None), title=f"{found['task']}: SmolLM2-135M-Instruct, GRPO")
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def learn(task: str, args: argparse.Namespace) -> dict[str, Any]:
    import datetime

    import torch
    from rollout import as_folder

    import trimtab

    settings = TASKS[task]
    rows, held_out = rows_of(task, args)
    held_out = held_out[: args.limit]
    scratch = Path(args.scratch)
    folder = as_folder(Path(args.model), scratch)
    found: dict[str, Any] = {"task": task, "date": datetime.date.today().isoformat(), "held_out": len(held_out)}
    found["machine"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
    found["command"] = " ".join(["python bench/real_learning.py", *words])
    held = {"train": rows[:1], "eval": held_out, **settings["data"]}
    if args.supervised and task == "gsm8k":
        tokens = {"max_new_tokens": settings["learn"]["max_new_tokens"]}
        found["base"] = trimtab.evaluate(model=str(folder), data=held, reward=NUMBER, learn=tokens)["eval/pass@1"]
        found["supervised"] = read_answers(folder, scratch / "supervised", rows, task, args.supervised)
        print(found["supervised"], flush=True)
        folder = scratch / "supervised"
    started = time.monotonic()
    summary = trimtab.train(
        model=str(folder),
        data=held | {"train": rows},
        reward=NUMBER,
        learn=settings["learn"] | ({"steps": args.steps} if args.steps else {}) | ({"lr": args.lr} if args.lr else {}),
        observe={"dir": str(args.out / f"{task}-run"), "eval_every": settings["eval_every"], "checkpoint_every": 0},
        overrides=args.set,
    )
    metrics = _lines(args.out / f"{task}-run" / "metrics.jsonl")
    found["seconds"] = time.monotonic() - started
    found["accuracy"] = [(row["step"], row["eval/pass@1"]) for row in metrics if "eval/pass@1" in row]
    found["reward"] = [row["reward/mean"] for row in metrics if row["step"] > 0]
    found["tokens"] = int(sum(row.get("rollout/tokens", 0) for row in metrics))
    found["summary"] = {key: value for key, value in summary.items() if isinstance(value, int | float | str)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=list(TASKS))
    parser.add_argument("--model", help="SmolLM2-135M-Instruct, a GGUF file or a folder")
    parser.add_argument("--data", help="folder with GSM8K's train.jsonl and test.jsonl")
    parser.add_argument("--rows", help="folder with the task's rows, made by --prepare")
    parser.add_argument("--prepare", type=Path, help="write the task's rows into this folder and stop")
    parser.add_argument("--supervised", type=int, default=3, help="passes over GSM8K's worked answers first")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--limit", type=int, help="held-out questions, at most")
    parser.add_argument("--set", nargs="*", default=[], help="keys of the config, such as run.token_budget=8192")
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    args = parser.parse_args()
    if args.prepare:
        args.prepare.mkdir(parents=True, exist_ok=True)
        for name, rows in zip(("train", "eval"), rows_of(args.task, args)):
            (args.prepare / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return
    if not args.model or (args.task == "gsm8k" and not args.data):
        parser.error("--model is needed, and for gsm8k --data")
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{args.task}-") as args.scratch:
        found = learn(args.task, args)
    (args.out / f"{args.task}.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / f"{args.task}.md").write_text(report(found))
    draw(found, args.out / f"{args.task}.png")
    print(report(found))


if __name__ == "__main__":
    main()
