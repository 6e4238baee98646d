"""The main job on an embedded default: a small transformer learns to sort digits on whatever the machine has.

A supervised warm start teaches the format and some of the answers; GRPO, with nothing but a right-or-wrong reward, does the
rest. The supervised phase is the update step itself: with advantage 1 the on-policy loss is the negative log-likelihood.
"""

from __future__ import annotations

import string
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trimtab.api import run_training
from trimtab.base.errors import ConfigError, Problem
from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.config.load import config_from_dict
from trimtab.data.tasks import TASKS
from trimtab.model.load import save_model
from trimtab.model.policy import Policy
from trimtab.observe.curve import CURVE_FILE
from trimtab.observe.waiting import waiting
from trimtab.observe.web.report import REPORT_FILE
from trimtab.record.reader import RunReader
from trimtab.run.inputs import Inputs
from trimtab.run.machine import physical_cores
from trimtab.update.batch import Sample
from trimtab.update.objectives.likelihood import Likelihood
from trimtab.update.updater import Updater

SPECIAL_TOKENS = ["<pad>", "<eos>"]
CHARACTERS = string.digits + "+-=" + string.ascii_lowercase + " :"
TASK = "sort"
TRAIN_ROWS, EVAL_ROWS = 4096, 256
CONTEXT = 64
MAX_DIGITS = (CONTEXT - len("sort =") - 2) // 2
"""Those of the question and of the answer, which may be two tokens longer."""


def demo_config(folder: Path, difficulty: int, steps: int, seed: int) -> dict[str, Any]:
    """The GRPO run, as a user would write it."""
    return {
        "model": {"path": str(folder / "warm-start")},
        "data": {
            "train": f"task:{TASK}",
            "eval": f"task:{TASK}",
            "options": {"difficulty": difficulty, "size": TRAIN_ROWS, "eval_size": EVAL_ROWS},
        },
        "reward": [{"fn": "task", "name": "correct"}],
        "learn": {
            "algorithm": "grpo",
            "steps": steps,
            "seed": seed,
            "prompts_per_step": 64,
            "samples_per_prompt": 8,
            "max_new_tokens": difficulty + 2,
            "lr": 6e-4,
            "schedule": {"kind": "linear", "warmup_steps": min(8, max(0, steps - 1)), "final": 0.1},
        },
        "observe": {"dir": str(folder / "run"), "eval_every": 20, "checkpoint_every": 50},
    }


def asked_steps(overrides: Sequence[str], usual: int) -> int:
    """The number of steps, which sets the learning rate's warm-up. The config refuses a value that is not a number."""
    asked = [line.removeprefix("learn.steps=") for line in overrides if line.startswith("learn.steps=")]
    return int(asked[-1]) if asked and asked[-1].isascii() and asked[-1].isdecimal() else usual


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *CHARACTERS])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")


def build_model(tokenizer: PreTrainedTokenizerFast, seed: int, context: int = CONTEXT) -> LlamaForCausalLM:
    """About a million parameters, random."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=context,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def warm_start(
    policy: Policy, tokenizer: Any, rows: list[dict[str, Any]], steps: int, batch: int = 128, lr: float = 2e-3
) -> list[float]:
    """Supervised steps on rows with an answer; returns the loss of each, in nats per token."""
    learn = resolve(Learn(loss="on_policy", aggregate="token_mean", lr=lr, steps=steps))
    updater = Updater(
        policy,
        Likelihood(),
        learn,
        token_budget=4096,
        score_token_budget=4096,
        logprob_chunk=4096,
        checkpoint_activations=False,
    )
    order, losses = np.random.default_rng(learn.seed), []
    for step in range(steps):
        samples = supervised_batch(tokenizer, [rows[index] for index in order.integers(0, len(rows), batch)])
        rate = lr * min(1.0, (step + 1) / 20)
        losses.append(float(updater.step(samples, rate, 0.0).sums["loss"]))
    return losses


def supervised_batch(tokenizer: Any, rows: list[dict[str, Any]]) -> list[Sample]:
    """Answers to learn, each token of them weighing the same."""
    samples = []
    for row in rows:
        tokens = torch.tensor([*tokenizer(row["answer"]).input_ids, tokenizer.eos_token_id])
        prompt = tokenizer(row["prompt"]).input_ids
        samples.append(Sample(prompt, tokens, torch.ones(len(tokens)), torch.empty(0), torch.zeros(len(tokens))))
    total = sum(s.tokens.shape[0] for s in samples)
    for sample in samples:
        sample.weights = torch.full((sample.tokens.shape[0],), 1 / total)
    return samples


def run_demo(
    folder: Path,
    *,
    difficulty: int,
    warm_steps: int,
    steps: int,
    seed: int,
    file: IO[str],
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Warm start, GRPO, before and after; returns the summary with `accuracy_before` and `accuracy_after`."""
    if not 1 <= difficulty <= MAX_DIGITS:
        what, fix = (
            f"{difficulty} is out of range",
            f"Write 1 to {MAX_DIGITS}: more digits exceed the model's context.",
        )
        raise ConfigError([Problem("--difficulty", what, fix)])
    if warm_steps < 1:
        raise ConfigError([Problem("--warm-steps", f"{warm_steps} is too few", "Write 1 or more; the default is 60.")])
    config = config_from_dict(demo_config(folder, difficulty, asked_steps(overrides, steps), seed), overrides)
    started = time.monotonic()
    torch.set_num_threads(physical_cores())
    tokenizer = build_tokenizer()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    policy = Policy(build_model(tokenizer, seed).to(device))
    rows = TASKS[TASK].generate(TRAIN_ROWS, difficulty, seed, "train")
    with waiting(file, f"warm start: {warm_steps} supervised steps"):
        losses = warm_start(policy, tokenizer, rows, warm_steps)
    print(
        f"warm start: {warm_steps} supervised steps, loss {losses[0]:.2f} -> {losses[-1]:.2f} nats per token, "
        f"{time.monotonic() - started:.0f} s",
        file=file,
    )
    save_model(policy.model, tokenizer, folder / "warm-start")
    summary = run_training(config, Inputs(name="demo"), console_file=file)
    run_dir = Path(summary["run_dir"])
    _show_samples(run_dir, config.learn.steps, file)
    curve, report = run_dir / CURVE_FILE, run_dir / REPORT_FILE
    if report.exists():
        print(f"the whole run in a browser: {report}", file=file)
    return {
        "accuracy_before": summary["eval"]["before"],
        "accuracy_after": summary["eval"]["after"],
        "seconds": round(time.monotonic() - started, 1),
        "run_dir": summary["run_dir"],
        "curve": str(curve) if curve.exists() else None,  # without matplotlib it is not drawn
        "report": str(report) if report.exists() else None,
    }


def _show_samples(run_dir: Path, last: int, file: IO[str]) -> None:
    """The same held-out questions before and after."""
    reader = RunReader(run_dir)
    before, after = ({row["prompt"]: row for row in reader.eval_samples(step)} for step in (0, last))
    print("held-out questions   before      after", file=file)
    for prompt in [p for p in before if p in after][:8]:
        shown = [
            f"{row['completion']:>6} {'right' if row['reward'] else 'wrong'}" for row in (before[prompt], after[prompt])
        ]
        print(f"  {prompt:<16} {shown[0]}  {shown[1]}", file=file)
