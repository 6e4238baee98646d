"""A small mixture of experts learns the demo's task, and what replaying routes does to the gap between engine and trainer.

    python bench/mixture.py OUT.md        # on a CPU, some ten minutes

A Qwen3-MoE of eight experts, two a token, is warmed up and trained by GRPO as `trimtab demo` is, in float32. Then some steps with
a learning rate of (almost) zero measure the gap in bfloat16, on random and on trained weights, with `learn.router_replay` and
without. On a CPU engine and trainer round alike; so the trainer sums its products in two halves, as another kernel would.
"""

from __future__ import annotations

import argparse
import platform
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bf16_gap import sum_in_halves
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from trimtab import demo
from trimtab.api import run_training
from trimtab.config.load import config_from_dict
from trimtab.model.load import save_model
from trimtab.record.reader import RunReader
from trimtab.run.inputs import Inputs
from trimtab.update.updater import Updater

GAPS = ("rollout/logprob_gap", "rollout/router_agreement")


def build(tokenizer: Any, seed: int, context: int = demo.CONTEXT) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            moe_intermediate_size=96,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
            norm_topk_prob=True,
            max_position_embeddings=context,
            initializer_range=0.08,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def gaps(model: Path, folder: Path, replay: bool) -> dict[str, float]:
    """Means over three steps in bfloat16 that change nothing to speak of."""
    tree = demo.demo_config(folder, 3, 3, 0)
    tree["model"] = {"path": str(model), "dtype": "bfloat16"}
    tree["data"]["eval"] = None
    tree["learn"] |= {
        "lr": 1e-12,
        "router_replay": replay,
        "max_new_tokens": 12,
        "prompts_per_step": 16,
        "sampling": {"stop_token_ids": []},
    }
    tree["observe"] = {"dir": str(folder), "eval_every": 0, "checkpoint_every": 0, "tensorboard": False}
    tree["run"] = {"engine": "native", "device": "cpu"}
    tree["reward"] = [{"fn": "object:varied"}]
    accumulate = Updater.accumulate_share

    def rounded_otherwise(self: Updater, *given: Any) -> Any:
        sum_in_halves(self.policy.model, True)
        try:
            return accumulate(self, *given)
        finally:
            sum_in_halves(self.policy.model, False)

    Updater.accumulate_share = rounded_otherwise
    try:
        inputs = Inputs(
            name="gap", rewards={"varied": lambda completions, **_: [n % 5 / 4 for n, _ in enumerate(completions)]}
        )
        run_training(config_from_dict(tree), inputs, console_file=sys.stderr)
    finally:
        Updater.accumulate_share = accumulate
    reader, known = RunReader(folder), {}
    reader.update()
    metrics = reader.metrics
    for name in GAPS:
        column = metrics.column(name)
        known[name] = float(column[~np.isnan(column)].mean()) if name in metrics.names else float("nan")
    return known


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    asked = parser.parse_args()
    demo.build_model = build
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        learned = demo.run_demo(
            folder, difficulty=3, warm_steps=25, steps=asked.steps, seed=0, file=sys.stderr,
            overrides=["learn.router_aux_coef=0.01"],
        )  # fmt: skip
        tokenizer = demo.build_tokenizer()
        save_model(build(tokenizer, 1), tokenizer, folder / "random")
        models = {"random": folder / "random", "trained": folder / "run" / "final"}
        table = {
            (name, replay): gaps(model, folder / f"{name}-{replay}", replay)
            for name, model in models.items()
            for replay in (False, True)
        }
    lines = [
        f"# A small mixture, {datetime.now(UTC).date()}",
        "",
        f"`python bench/mixture.py`, {platform.machine()} CPU, torch {torch.__version__}, {time.monotonic() - began:.0f} s.",
        "Qwen3-MoE, 8 experts, 2 a token, 4 layers, hidden size 128; the demo's task (sort 3 digits), float32, "
        f"{asked.steps} steps of GRPO with router_aux_coef 0.01.",
        "",
        f"Accuracy on 256 held-out questions: {learned['accuracy_before']:.1%} before, {learned['accuracy_after']:.1%} after.",
        "",
        "| weights, bfloat16 | replay | mean log-prob gap, nats | routers agree |",
        "|---|---|---|---|",
    ]
    for (name, replay), found in table.items():
        agree = f"{found[GAPS[1]]:.4f}" if replay else "-"
        lines.append(f"| {name} | {'yes' if replay else 'no'} | {found[GAPS[0]]:.5f} | {agree} |")
    asked.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
