"""A GRPO step on one GPU, end to end: Trimtab, and TRL with vLLM in the same process, on the same model, prompts and settings.

    python bench/grpo_step.py --model smollm2.gguf --gsm8k train.jsonl          # workload G, both sides
    python bench/grpo_step.py --model smollm2.gguf --gsm8k train.jsonl --sides trimtab --steps 12
    python bench/grpo_step.py --model smollm2.gguf --gsm8k train.jsonl --sides trl --sweep
    python bench/grpo_step.py --workloads 1.5b                                  # random weights, 1,024 new tokens

Workload G: SmolLM2-135M-Instruct on GSM8K train questions, 32 prompts x 16 samples, at most 512 new tokens, temperature 1,
learning rate 1e-6, no KL, one update a step. `1.5b`: a Qwen2 of 1.5B random parameters, 16 prompts of 128 random tokens x 16
samples, 1,024 new tokens each. `7b-lora`: a Qwen2 of 7.6B random parameters, adapters of rank 16 on every linear layer, 16
prompts x 8 samples of 256 tokens. Each side runs in a fresh process. A step's seconds are wall time from the end of one step to
the end of the next; the first --skip and the last are left out. Tokens are completion tokens up to and including the stop
token. Peak memory is what the device had in use (NVML), which counts what allocators keep in reserve, and what was allocated:
torch's peak, for Trimtab with the rollout arena, which torch does not know of. TRL's settings are its best so far;
--sweep tries others. Trimtab runs with every `run` key on auto; --run adds rows with some of them pinned.

Writes bench/results/grpo_step-DATE.json and .md.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"

WORKLOADS: dict[str, dict[str, Any]] = {
    "G": {"prompts_per_step": 32, "samples_per_prompt": 16, "max_new_tokens": 512, "lr": 1e-6},
    "1.5b": {"prompts_per_step": 16, "samples_per_prompt": 16, "max_new_tokens": 1024, "lr": 1e-6},
    "7b-lora": {"prompts_per_step": 16, "samples_per_prompt": 8, "max_new_tokens": 256, "lr": 1e-5, "lora": 16},
}
TRL_BEST: dict[str, dict[str, Any]] = {
    "G": {"per_device_train_batch_size": 128, "gradient_accumulation_steps": 4, "vllm_gpu_memory_utilization": 0.35},
    "1.5b": {"per_device_train_batch_size": 16, "gradient_accumulation_steps": 16, "vllm_gpu_memory_utilization": 0.35},
    "7b-lora": {
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 8,
        "vllm_gpu_memory_utilization": 0.35,
    },
}
TRL_SWEEP: dict[str, dict[str, dict[str, Any]]] = {
    "G": {
        "micro-batch 128": {},
        "Liger": {"use_liger_kernel": True},
        "checkpointing": {"gradient_checkpointing": True},
        "utilisation 0.5, micro-batch 64": {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 8,
                            "vllm_gpu_memory_utilization": 0.5},
        "micro-batch 64": {"per_device_train_batch_size": 64, "gradient_accumulation_steps": 8},
        "micro-batch 32": {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 16},
    },
    "1.5b": {
        "micro-batch 16": {},
        "Liger, micro-batch 32": {"use_liger_kernel": True, "per_device_train_batch_size": 32,
                                  "gradient_accumulation_steps": 8, "vllm_gpu_memory_utilization": 0.2},
        "Liger": {"use_liger_kernel": True},
        "checkpointing": {"gradient_checkpointing": True},
    },
    "7b-lora": {
        "micro-batch 16": {},
        "Liger": {"use_liger_kernel": True},
        "checkpointing": {"gradient_checkpointing": True},
    },
}  # fmt: skip


def last_number(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 where the last number of a completion is the answer."""
    values = []
    for completion, wanted in zip(completions, answer):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        found = re.findall(r"-?\d[\d,]*\.?\d*", text)
        values.append(float(bool(found) and found[-1].replace(",", "").rstrip(".") == wanted))
    return values


def rows_of(gsm8k: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in gsm8k.read_text().splitlines()]
    return [
        {
            "prompt": [{"role": "user", "content": row["question"]}],
            "answer": row["answer"].split("####")[1].strip().replace(",", ""),
        }
        for row in rows
    ]


def make_random(shape: str, folder: Path) -> list[dict[str, Any]]:
    """A Qwen2 of random parameters with a tokenizer of as many words, which never stops, unless it is there; and its prompts."""
    import random

    from rollout import random_prompts

    if not (folder / "tokenizer.json").exists():
        save_random(shape, folder)
    draw = random.Random(0)
    return [
        {"prompt": " ".join(f"w{t}" for t in tokens), "answer": str(draw.randrange(10))}
        for tokens in random_prompts(512)
    ]


def save_random(shape: str, folder: Path) -> None:
    import torch
    from rollout import SHAPES
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    size = int(SHAPES[shape]["vocab_size"])
    core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="w1", eos_token="w2", unk_token="w0")
    config = Qwen2Config(
        max_position_embeddings=4096,
        pad_token_id=1,
        eos_token_id=2,
        bos_token_id=None,
        dtype="bfloat16",
        **SHAPES[shape],
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def parameters_of(folder: Path) -> int:
    from safetensors import safe_open

    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names = list(tensors.keys())
            if any("lm_head" in name for name in names):  # then the embedding is a table and no product
                names = [name for name in names if "embed_tokens" not in name]
            count += sum(math.prod(tensors.get_slice(name).get_shape()) for name in names)
    return count


class Gauge(threading.Thread):
    """Most device memory in use, as NVML sees it."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0

    def run(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        device = pynvml.nvmlDeviceGetHandleByIndex(0)
        while True:
            self.peak = max(self.peak, pynvml.nvmlDeviceGetMemoryInfo(device).used)
            time.sleep(0.05)


# --- one side, in its own process


def run_trimtab(spec: dict[str, Any]) -> dict[str, Any]:
    from peers import ADAMW

    import trimtab

    work, out = spec["work"], Path(spec["out"])
    trimtab.train(
        {"data": {"shuffle": False}},
        model={"path": spec["folder"]} | ({"lora": {"r": work["lora"]}} if "lora" in work else {}),
        data=json.loads(Path(spec["rows"]).read_text()),
        reward=f"{__file__}:last_number",
        learn={
            "algorithm": "grpo",
            "steps": spec["steps"],
            "optimizer": ADAMW,
            "max_grad_norm": 1.0,
            **{k: work[k] for k in ("prompts_per_step", "samples_per_prompt", "max_new_tokens", "lr")},
        },
        run=spec["settings"],
        observe={"dir": str(out), "checkpoint_every": 0, "samples_every": 0, "tensorboard": False},
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 0]
    phases = sorted({name for row in rows for name in row if name.startswith("time/")} - {"time/total"})
    return {
        "seconds": [row["time/total"] for row in rows],
        "tokens": [row["rollout/tokens"] for row in rows],
        "rewards": [row["reward/mean"] for row in rows],
        "logprob_gap": [row.get("rollout/logprob_gap") for row in rows],
        "phases": {name.removeprefix("time/"): [row.get(name, 0.0) for row in rows] for name in phases},
        "update_tokens": [row["run/packing_fill"] * row["run/microbatches"] * row["run/token_budget"] for row in rows],
        "peak_gib": {
            name.removeprefix("memory/").removesuffix("_peak_gib"): max(row.get(name, 0.0) for row in rows)
            for row in rows[-1:]
            for name in row
            if name.endswith("_peak_gib")
        },
        "peak_allocated_gib": max(row[name] for row in rows for name in row if name.endswith("_peak_gib")),
    }


def run_trl(spec: dict[str, Any]) -> dict[str, Any]:
    import torch
    import trl
    from datasets import Dataset
    from peers import trl_settings
    from transformers import TrainerCallback

    work = spec["work"]
    rewards: list[float] = []
    tokens: list[int] = []
    ends: list[float] = []
    generate_s: list[float] = []

    def reward(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        values = last_number(completions, columns["answer"])
        rewards.append(sum(values) / len(values))
        tokens.append(sum(map(len, completion_ids)))
        return values

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    class Trainer(trl.GRPOTrainer):  # type: ignore[misc,name-defined]
        def _generate(self, *args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            made = super()._generate(*args, **kwargs)
            generate_s.append(time.perf_counter() - started)
            return made

    settings = {
        "output_dir": spec["out"],
        "bf16": True,
        **trl_settings(work, spec["steps"]),
        "use_vllm": True,
        "vllm_mode": "colocate",
        **spec["settings"],
    }
    adapters: dict[str, Any] = {}
    if "lora" in work:
        from peft import LoraConfig

        rank = work["lora"]
        adapters["peft_config"] = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", lora_dropout=0.0)
    trainer = Trainer(
        **adapters,
        model=spec["folder"],
        reward_funcs=reward,
        args=trl.GRPOConfig(**settings, model_init_kwargs={"dtype": "bfloat16"}),
        train_dataset=Dataset.from_list(json.loads(Path(spec["rows"]).read_text())),
        callbacks=[Clock()],
    )
    trainer.train()
    return {
        "seconds": [b - a for a, b in itertools.pairwise(ends)],
        "tokens": tokens,
        "rewards": rewards,
        "phases": {"rollout": generate_s},
        "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def worker(side: str, spec: Path, answer: Path) -> None:
    gauge = Gauge()
    gauge.start()
    found = {"trimtab": run_trimtab, "trl": run_trl}[side](json.loads(spec.read_text()))
    answer.write_text(json.dumps(found | {"peak_used_gib": gauge.peak / 2**30}))


# --- both sides


def call(
    side: str, work: dict[str, Any], folder: Path, rows: Path, settings: dict[str, Any], args: argparse.Namespace
) -> dict[str, Any]:
    """Run one side in a fresh process and return what it measured."""
    python = args.trl_python if side == "trl" else sys.executable
    with tempfile.TemporaryDirectory(prefix=f"grpo-{side}-") as scratch:
        spec, answer = Path(scratch) / "spec.json", Path(scratch) / "answer.json"
        steps = args.trl_steps if side == "trl" else args.steps
        spec.write_text(
            json.dumps(
                {"work": work, "folder": str(folder), "rows": str(rows), "out": f"{scratch}/run", "steps": steps,
                 "settings": settings}
            )
        )  # fmt: skip
        command = [python, __file__, "--worker", side, str(spec), str(answer)]
        env = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=args.limit)
        if done.returncode:
            raise RuntimeError(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(answer.read_text())
    last = len(found["seconds"]) - 1
    counted = slice(min(args.skip, last - 1), last)
    seconds, tokens = found["seconds"][counted], found["tokens"][counted]
    if "update_tokens" in found:
        # Without gradients of weights a parameter costs four operations a token instead of six.
        flops = (4 if "lora" in work else 6) * parameters_of(folder) * sum(found["update_tokens"][counted])
        found["update_mfu"] = flops / sum(found["phases"]["update"][counted]) / args.flops_per_s
    return found | {
        "settings": settings,
        "s_per_step": statistics.median(seconds),
        "tokens_per_s": sum(tokens) / sum(seconds),
        "phase_s": {
            name: statistics.median(times[counted]) for name, times in found["phases"].items() if times[counted]
        },
    }


def describe(side: str, run: dict[str, Any]) -> str:
    phases = ", ".join(f"{name} {s:.2f}" for name, s in run["phase_s"].items() if s >= 0.005)
    return (
        f"{side}: {run['s_per_step']:.2f} s/step, {run['tokens_per_s']:,.0f} tokens/s, peak {run['peak_allocated_gib']:.1f} GiB "
        f"allocated, {run['peak_used_gib']:.1f} used; {phases}; update MFU {run.get('update_mfu', 0):.0%}"
    )


def report(found: dict[str, Any]) -> str:
    lines = [f"# A GRPO step end to end, {found['date']}, {found['machine']}", ""]
    lines += [
        "| workload | side | s/step | completion tokens/s | update MFU | peak allocated | peak used | phases, s |",
        "|" + "---|" * 8,
    ]
    for name, sides in found["workloads"].items():
        for side, run in sides.items():
            phases = ", ".join(f"{phase} {s:.2f}" for phase, s in run["phase_s"].items() if s >= 0.005)
            mfu = f"{run['update_mfu']:.0%}" if "update_mfu" in run else "-"
            lines.append(
                f"| {name} | {side} | {run['s_per_step']:.2f} | {run['tokens_per_s']:,.0f} | {mfu} "
                f"| {run['peak_allocated_gib']:.1f} GiB | {run['peak_used_gib']:.1f} GiB | {phases} |"
            )
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=["G"], choices=list(WORKLOADS))
    parser.add_argument("--model", type=Path, help="SmolLM2-135M-Instruct, a GGUF file or a folder")
    parser.add_argument("--gsm8k", type=Path, help="train.jsonl")
    parser.add_argument("--sides", nargs="+", default=["trimtab", "trl"], choices=["trimtab", "trl"])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--trl-steps", type=int, default=5)
    parser.add_argument("--skip", type=int, default=2)
    parser.add_argument("--sweep", action="store_true", help="TRL's settings one by one")
    parser.add_argument("--settings", nargs="+", help="of the --sweep, by name; default all")
    parser.add_argument("--models", type=Path, help="folder that keeps the random models for the next call")
    parser.add_argument(
        "--run", nargs="+", type=json.loads, default=[], help='Trimtab again with these, {"token_budget": 16384}'
    )
    parser.add_argument("--trl-python", default=sys.executable)
    parser.add_argument("--limit", type=int, default=600, help="seconds that one side may take")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--worker", nargs=3, metavar=("SIDE", "SPEC", "ANSWER"))
    return parser.parse_args()


def tries_of(side: str, name: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What to run of a side: a name in the table -> its settings."""
    if side == "trimtab":
        return {side: {}} | {f"trimtab, {json.dumps(settings)}": settings for settings in args.run}
    if not args.sweep:
        return {side: TRL_BEST[name]}
    unknown = [what for what in args.settings or [] if not any(what in sweep for sweep in TRL_SWEEP.values())]
    if unknown:
        raise SystemExit(f"--settings: no sweep has {', '.join(unknown)}; {name} has {', '.join(TRL_SWEEP[name])}")
    tried = args.settings or list(TRL_SWEEP[name])
    return {f"trl, {what}": TRL_BEST[name] | TRL_SWEEP[name][what] for what in tried if what in TRL_SWEEP[name]}


def compare(args: argparse.Namespace) -> None:
    import torch
    from rollout import as_folder
    from roofline import ceilings

    args.flops_per_s = ceilings()["flops_per_s"]
    torch.cuda.empty_cache()
    found: dict[str, Any] = {"date": datetime.date.today().isoformat(), "machine": torch.cuda.get_device_name()}
    found |= {"flops_per_s": args.flops_per_s, "workloads": {}}
    with tempfile.TemporaryDirectory(prefix="grpo-") as scratch:
        for name in args.workloads:
            rows = Path(scratch) / f"{name}.json"
            if name == "G":
                folder = as_folder(args.model, Path(scratch))
                rows.write_text(json.dumps(rows_of(args.gsm8k)))
            else:
                shape = name.split("-")[0]
                folder = (args.models or Path(scratch)) / shape
                rows.write_text(json.dumps(make_random(shape, folder)))
            torch.cuda.empty_cache()
            runs = found["workloads"].setdefault(name, {})
            for side in args.sides:
                for what, settings in tries_of(side, name, args).items():
                    try:
                        runs[what] = call(side, WORKLOADS[name], folder, rows, settings, args)
                        print(describe(f"{name} {what}", runs[what]), flush=True)
                    except (RuntimeError, subprocess.TimeoutExpired) as error:
                        print(f"{name} {what}: {error}", flush=True)
                    write(found, args.out)
    print(report(found))


def write(found: dict[str, Any], folder: Path) -> None:
    """After every run, so that one that is cut off loses only itself."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"grpo_step-{found['date']}"
    file.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    file.with_suffix(".md").write_text(report(found))


if __name__ == "__main__":
    asked = arguments()
    if asked.worker:
        worker(asked.worker[0], Path(asked.worker[1]), Path(asked.worker[2]))
    else:
        compare(asked)
