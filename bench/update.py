"""Speed of the update: forward and backward of a packed row through the model's own modules and through the fused layers.

    python bench/update.py                                   # SmolLM2-135M, 0.5b and 1.5b shapes, 32k tokens, random weights
    python bench/update.py --shapes 0.5b --tokens 65536 --checkpoint
    python bench/update.py --shapes --head                   # only the log-prob head, 16k tokens by 152k words

Workload U: sequences of 150 to 660 random tokens (random.Random(0)) laid end to end up to --tokens, all but the first of each
a target, bf16, no optimizer. MFU is (6 x parameters x tokens + attention) over the matrix rate measured in the same run;
a tied head counts once. `head`: log-prob and entropy of 16,384 tokens against the bare product of the same operands, forward, and
with the backward pass against three such products; extra memory is the peak above inputs and outputs.

Prints a table and, with --out, writes it as JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
from pathlib import Path
from typing import Any

import torch
from rollout import SHAPES
from roofline import ceilings, event_seconds
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from trimtab.model.head import Head
from trimtab.model.kernel_choice import fuse
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy

SMOLLM2 = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
           "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}  # fmt: skip


def make_policy(shape: str) -> Policy:
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        if shape == "smollm2":
            model: Any = LlamaForCausalLM(LlamaConfig(max_position_embeddings=8192, **SMOLLM2))
        else:
            model = Qwen2ForCausalLM(Qwen2Config(max_position_embeddings=8192, **SHAPES[shape]))
        torch.set_default_dtype(torch.float32)
    return Policy(model)


def lengths_of(tokens: int) -> list[int]:
    numbers, lengths, left = random.Random(0), [], tokens
    while left:
        lengths.append(min(left, numbers.randint(150, 660)))
        left -= lengths[-1]
    return lengths


def seconds(work: Any, repeats: int = 5) -> float:
    """Median of a few calls after two, by events on the device."""
    for _ in range(2):
        work()
    return statistics.median(event_seconds(work, repeats))


def update(policy: Policy, tokens: int, flops_per_s: float, chunk: int) -> dict[str, float]:
    lengths = lengths_of(tokens)
    plan = PackedPlan(lengths, "cuda")
    row = torch.randint(0, policy.config.vocab_size, (tokens,), device="cuda")
    ends = torch.tensor(lengths).cumsum(0) - 1
    predictors = torch.tensor(sorted(set(range(tokens)) - set(ends.tolist())), device="cuda")
    targets = row[predictors + 1]
    weights = torch.randn(len(targets), device="cuda")

    def work() -> None:
        hidden = policy.hidden(row, plan.positions, plan)
        stats = policy.head.token_stats(hidden.index_select(0, predictors), targets, 1.0, chunk)
        (stats.logprobs * weights).sum().backward()
        for parameter in policy.parameters():
            parameter.grad = None

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    took = seconds(work)
    config = policy.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 6 * sum(n * n for n in lengths) * config.num_attention_heads * size * config.num_hidden_layers
    flops = 6 * policy.parameter_count() * tokens + attention
    return {
        "tokens_per_s": tokens / took, "ms": took * 1e3, "mfu": flops / took / flops_per_s,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }  # fmt: skip


def head(width: int, vocabulary: int, tokens: int, chunk: int) -> dict[str, float]:
    hidden = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(vocabulary, width, device="cuda") / width**0.5).bfloat16()
    targets = torch.randint(0, vocabulary, (tokens,), device="cuda")
    part = hidden[:4096]
    bare = seconds(lambda: torch.mm(part, weight.t())) * tokens / 4096
    own = Head(weight)
    with torch.no_grad():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        forward = seconds(lambda: own.token_stats(hidden, targets, 1.0, chunk))
        forward_peak = torch.cuda.max_memory_allocated() - before
    hidden.requires_grad_()
    weight.requires_grad_()

    def both() -> None:
        own.token_stats(hidden, targets, 1.0, chunk).logprobs.sum().backward()
        hidden.grad = weight.grad = None

    torch.cuda.reset_peak_memory_stats()
    whole = seconds(both)
    peak = torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes
    return {
        "bare_ms": bare * 1e3, "forward_ms": forward * 1e3, "forward_ratio": forward / bare, "both_ms": whole * 1e3,
        "both_ratio": whole / bare / 4, "forward_extra_gib": forward_peak / 2**30, "extra_gib": peak / 2**30,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["smollm2", "0.5b", "1.5b"])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--paths", nargs="+", default=["modules", "fused"], choices=["modules", "fused"])
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    ceiling = ceilings()["flops_per_s"]
    found: dict[str, Any] = {"tokens": args.tokens, "flops_per_s": ceiling, "torch": torch.__version__}
    print(f"{torch.cuda.get_device_name()}, {ceiling / 1e12:.0f} TFLOP/s")
    for shape in args.shapes:
        for path in args.paths:
            policy = make_policy(shape)
            if path == "fused":
                fuse(policy)
                print(shape, policy.description)
            if args.checkpoint:
                policy.model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
            result = update(policy, args.tokens, ceiling, args.chunk)
            found[f"{shape} {path}"] = result
            print(
                f"{shape:8} {path:8} {result['tokens_per_s']:9,.0f} tokens/s {result['ms']:7.1f} ms "
                f"{100 * result['mfu']:5.1f} % {result['peak_gib']:6.1f} GiB",
                flush=True,
            )
            del policy
            gc.collect()
            torch.cuda.empty_cache()
    for width in (896, 1536, 3584) if args.head else ():
        found[f"head {width}"] = result = head(width, 151936, 16384, args.chunk)
        print(f"head {width}: " + ", ".join(f"{name} {value:.2f}" for name, value in result.items()), flush=True)
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
