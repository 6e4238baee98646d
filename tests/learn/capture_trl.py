"""Runs the real TRL on a CPU and writes down what its GRPOTrainer and RLOOTrainer computed: the fixture of test_trl.py.

    python -m venv build/trl-venv && build/trl-venv/bin/pip install trl==1.16.0 torch
    build/trl-venv/bin/python tests/learn/capture_trl.py          # writes tests/learn/trl.safetensors

One batch is sampled by TRL itself from a tiny random model in float64, and one of its optimizer steps moves the policy far
enough that ratios are clipped. Then, for every case, a new trainer with that case's settings scores the same completions
(rewards, advantages, old and reference log-probs) and computes the loss of the moved policy and its gradient. Nothing of TRL is
replaced but the sampling, from the second trainer on, by what the first one sampled; with gradient accumulation the batch is
cut as TRL cuts it, but in order.

The file holds the batch, both sets of weights and, for every case, settings, advantages, loss and gradient. This script imports
nothing of Trimtab.
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

FILE = Path(__file__).with_name("trl.safetensors")
WORDS = ["<pad>", "<eos>", *"0123456789+=abcdef"]
PROMPTS = ["1+2=", "4=", "90+21+3=", "7+70="]
SAMPLES, NEW_TOKENS, SEED = 4, 10, 7
MODEL = {
    "vocab_size": len(WORDS), "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1,
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "grpo, on policy": {"loss_type": "grpo", "on_policy": True},
    "grpo, kl": {"loss_type": "grpo", "beta": 0.1},
    "grpo, corrected kl": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
    "grpo, high clip": {"loss_type": "grpo", "epsilon": 0.1, "epsilon_high": 0.4},
    "grpo, delta": {"loss_type": "grpo", "delta": 1.5},
    "grpo, no scale": {"loss_type": "grpo", "scale_rewards": "none"},
    "grpo, batch scale": {"loss_type": "grpo", "scale_rewards": "batch"},
    "grpo, accumulated": {"loss_type": "grpo", "gradient_accumulation_steps": 2},
    "grpo, truncated": {"loss_type": "grpo", "mask_truncated_completions": True},
    "grpo, unscorable": {"loss_type": "grpo", "unscorable": [5]},
    "grpo, two rewards": {"loss_type": "grpo", "reward_weights": [1.0, 0.5]},
    "bnpo": {"loss_type": "bnpo"},
    "bnpo, accumulated": {"loss_type": "bnpo", "gradient_accumulation_steps": 2},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "dr_grpo, kl": {"loss_type": "dr_grpo", "scale_rewards": "none", "beta": 0.05},
    "dr_grpo, truncated": {"loss_type": "dr_grpo", "scale_rewards": "none", "mask_truncated_completions": True},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dapo, accumulated": {"loss_type": "dapo", "epsilon_high": 0.28, "gradient_accumulation_steps": 2},
    "dapo, truncated": {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": True, "beta": 0.1},
    "dapo, entropy": {"loss_type": "dapo", "epsilon_high": 0.28, "entropy_coef": 0.02},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.3},
    "cispo, kl": {"loss_type": "cispo", "epsilon_high": 1.3, "beta": 0.1},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-2, "epsilon_high": 4e-2},
    "gspo, kl and delta": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-2,
        "epsilon_high": 4e-2,
        "beta": 0.1,
        "delta": 1.1,
    },
    "gspo, corrected kl": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-2,
        "epsilon_high": 4e-2,
        "beta": 0.1,
        "use_bias_correction_kl": True,
    },
    "rloo": {"rloo": True},
    "rloo, high clip": {"rloo": True, "epsilon": 0.1, "epsilon_high": 0.4},
    "rloo, normalized": {"rloo": True, "normalize_advantages": True},
    "rloo, clipped rewards": {"rloo": True, "reward_clip_range": (-0.5, 1.2)},
}
OURS = ("on_policy", "unscorable", "rloo")
"""Of a case: what is not a setting of TRL."""
GRPO_ONLY = ("use_bias_correction_kl",)


def spread(completions: list[str], **_: Any) -> list[float]:
    return [len(set(c)) / 4 + c.count("a") - c.count("7") / 2 for c in completions]


def brief(completions: list[str], **_: Any) -> list[float]:
    return [-len(c) / 10 for c in completions]


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", padding_side="left")


def save_start(folder: Path) -> None:
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(LlamaConfig(**MODEL)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.35 * torch.randn(parameter.shape, dtype=torch.float64))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def trainer(folder: Path, case: dict[str, Any]) -> GRPOTrainer | RLOOTrainer:
    """As its users make one; the batch of a step is the whole set of prompts."""
    make_config, make = (RLOOConfig, RLOOTrainer) if case.get("rloo") else (GRPOConfig, GRPOTrainer)
    settings = {name: value for name, value in case.items() if name not in OURS}
    accumulated = settings.get("gradient_accumulation_steps", 1)
    usual = {
        "output_dir": str(folder / "out"),
        "per_device_train_batch_size": len(PROMPTS) * SAMPLES // accumulated,
        "num_generations": SAMPLES,
        "max_completion_length": NEW_TOKENS,
        "learning_rate": 3e-2,
        "beta": 0.0,
        "epsilon": 0.2,
        "generation_kwargs": {"suppress_tokens": [0]},
        "use_bias_correction_kl": False,
        "num_iterations": 1 if case.get("on_policy") else 2,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "max_steps": 1,
        "model_init_kwargs": {"dtype": "auto"},
        "gradient_checkpointing": False,
        "shuffle_dataset": False,
        "seed": SEED,
        "save_strategy": "no",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "dataloader_pin_memory": False,
        "max_grad_norm": 0.0,
    }
    if case.get("rloo"):
        usual = {name: value for name, value in usual.items() if name not in GRPO_ONLY}
    config = make_config(**usual | settings)
    hidden = set(case.get("unscorable", []))

    def reward(completions: list[str], **columns: Any) -> list[float | None]:
        return [None if i in hidden else value for i, value in enumerate(spread(completions))]

    rewards = [spread, brief] if "reward_weights" in case else [reward]
    rows = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    return make(str(folder), reward_funcs=rewards, args=config, train_dataset=rows, processing_class=tokenizer())


def sample(folder: Path) -> tuple[Any, dict[str, torch.Tensor]]:
    """What TRL generated in its first step, and the weights after it."""
    first, seen = trainer(folder, {"loss_type": "grpo"}), []
    generate = first._generate

    def recorded(prompts: list[str]) -> Any:
        assert not seen, "one batch"
        seen.append((list(prompts), generate(prompts)))
        return seen[-1][1]

    first._generate = recorded
    first.train()
    return seen[0], {name: p.detach().clone() for name, p in first.model.named_parameters()}


def measure(folder: Path, case: dict[str, Any], batch: Any, moved: dict[str, torch.Tensor]) -> dict[str, Any]:
    """TRL's advantages, loss and gradient in one case."""
    prompts, generated = batch
    judge = trainer(folder, case)
    prompt_ids, completion_ids, _, texts, *_ = generated
    judge._generate = lambda asked: (prompt_ids, completion_ids, texts) if case.get("rloo") else generated
    judge.model.train()
    judge.current_gradient_accumulation_steps = accumulated = judge.args.gradient_accumulation_steps
    inputs = judge._generate_and_score_completions([{"prompt": prompt} for prompt in prompts])
    assert ("old_per_token_logps" in inputs or "old_logps" in inputs) != bool(case.get("on_policy"))
    if not case.get("on_policy"):
        with torch.no_grad():
            for name, parameter in judge.model.named_parameters():
                parameter.copy_(moved[name])
    loss, size = 0.0, len(prompts) // accumulated
    for at in range(0, len(prompts), size):
        part = {k: v[at : at + size] if v.ndim else v for k, v in inputs.items()}
        found = judge.compute_loss(judge.model, part)
        found.backward()
        loss += found.item()
    gradient = {name: p.grad.detach().clone() for name, p in judge.model.named_parameters()}
    return {"inputs": inputs, "loss": loss, "gradient": gradient}


def main() -> None:
    tensors: dict[str, torch.Tensor] = {}
    facts: dict[str, Any] = {
        "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
        "model": MODEL, "samples": SAMPLES, "new_tokens": NEW_TOKENS, "cases": CASES, "losses": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        save_start(folder)
        batch, moved = sample(folder)
        start = {
            name: p.detach()
            for name, p in LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64).named_parameters()
        }
        completions = batch[1][3]
        facts |= {"prompts": batch[1][0], "completions": batch[1][1]}
        facts["rewards"] = {"spread": spread(completions), "brief": brief(completions)}
        for name, case in CASES.items():
            found = measure(folder, case, batch, moved)
            facts["losses"][name] = found["loss"]
            tensors[f"advantages/{name}"] = found["inputs"]["advantages"]
            if name == "grpo, kl":
                for key in ("old_per_token_logps", "ref_per_token_logps"):
                    tensors[key] = found["inputs"][key]
            # The gradient of all parameters in one row, in the order of their names.
            tensors[f"gradient/{name}"] = torch.cat([g.flatten() for _, g in sorted(found["gradient"].items())])
            norm = float(tensors[f"gradient/{name}"].norm())
            print(f"{name:24} loss {found['loss']:+.6f}  gradient {norm:.4f}", flush=True)
    tensors |= {f"start/{name}": value for name, value in start.items()} | {f"moved/{n}": v for n, v in moved.items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, FILE, {"facts": json.dumps(facts)})
    print(f"{FILE}: {FILE.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
