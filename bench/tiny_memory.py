"""Memory of whole runs of small models on one GPU, predicted beside measured, several runs in one process.

    PYTHONPATH=src python bench/tiny_memory.py

A few layers under a large vocabulary, few tokens a step: what a plan of large models may round away (the embedding's gradient,
workspaces) is here a share of the whole. Every run is in the same process, as in a notebook: what one leaves behind would show in
the next. Random weights; rewards differ from sample to sample, so that gradients are not zero.

Writes bench/results/tiny_memory-DATE.md.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from tiny import tiny_tokenizer  # noqa: E402

import trimtab  # noqa: E402
from trimtab.record.sinks import read_metrics  # noqa: E402

LEARN = {"steps": 4, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 64, "lr": 1e-6}
WIDE = {"hidden_size": 1408, "intermediate_size": 3840, "num_hidden_layers": 2, "vocab_size": 50021}
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 32000}
CASES: dict[str, dict[str, Any]] = {
    "llama, 11 heads": {"kind": "llama", **WIDE, "num_attention_heads": 11, "num_key_value_heads": 11},
    "qwen2, 22 heads, 2 of keys": {"kind": "qwen2", **WIDE, "num_attention_heads": 22, "num_key_value_heads": 2},
    "qwen2, tied": {
        "kind": "qwen2", **WIDE, "num_attention_heads": 22, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "olmo2, no fused layers": {"kind": "olmo2", **WIDE, "num_attention_heads": 22, "num_key_value_heads": 22},
    "llama, hidden size 256": {"kind": "llama", **SMALL, "num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2, LoRA": {"kind": "qwen2", **WIDE, "num_attention_heads": 22, "num_key_value_heads": 2, "lora": 16},
}  # fmt: skip


def reward(completions: list[str], **_: Any) -> list[float]:
    return [zlib.crc32(text.encode()) % 100 / 100 for text in completions]


def measure(case: dict[str, Any], folder: Path) -> dict[str, float]:
    """The last step's row of a run."""
    settings = {"tie_word_embeddings": False, "max_position_embeddings": 2048} | case
    kind, rank = settings.pop("kind"), settings.pop("lora", 0)
    config = AutoConfig.for_model(kind, pad_token_id=0, bos_token_id=1, eos_token_id=2, **settings)
    with torch.device("cuda"):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    model = {"path": str(folder / "model")} | ({"lora": {"r": rank}} if rank else {})
    rows = [{"prompt": f"{a}+{b}="} for a in range(9) for b in range(9)]
    with contextlib.redirect_stdout(io.StringIO()):
        trimtab.train(
            model=model,
            data=rows,
            reward=reward,
            learn=LEARN,
            observe={"dir": str(folder / "run"), "tensorboard": False},
        )
    return read_metrics(folder / "run")[-1]


def main() -> None:
    today, machine = datetime.date.today(), torch.cuda.get_device_name()
    lines = [
        f"# Memory of small models, {today}, {machine}",
        "",
        "Whole runs one after the other in one process, 4 prompts x 4 samples of 64 tokens, every `run` key on auto. Peak "
        "allocated, GiB.",
        "",
        "| model | rollout | predicted | update | predicted | predicted / measured |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, case in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            row = measure(case, Path(folder))
        found = [
            row[f"memory/{phase}_{what}"] for phase in ("rollout", "update") for what in ("peak_gib", "predicted_gib")
        ]
        share = row["memory/predicted_over_measured"]
        lines.append(f"| {name} | {' | '.join(f'{value:.3f}' for value in found)} | {share:.3f} |")
        print(lines[-1], flush=True)
    (ROOT / "bench" / "results" / f"tiny_memory-{today}.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
