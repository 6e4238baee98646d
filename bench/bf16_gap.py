"""How far apart two bfloat16 forwards of the same model are, in nats of log-prob: what an engine's gap is to be read against.

    python bench/bf16_gap.py --model smollm2.gguf --gsm8k train.jsonl        # on a CPU, about two minutes

Completions of a few GSM8K questions are sampled in float32. Their log-probs are then computed in bfloat16 four ways: with the
residual rounded to bfloat16 at every sum, as transformers' modules do, or kept in float32; and with every product summed in one
go, or in two halves. Printed is the mean distance from float32, and between the two orders of summation.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from rollout import as_folder, gsm8k_prompts

from trimtab.config.learn import Sampling
from trimtab.config.schema import Model
from trimtab.data.prompt import Prompt
from trimtab.model.load import load_model
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import Policy
from trimtab.rollout.engine import Request
from trimtab.rollout.native.engine import NativeEngine
from trimtab.rollout.trajectory import Group

CPU = torch.device("cpu")


def sample(policy: Policy, prompts: list[list[int]]) -> list[Group]:
    engine = NativeEngine(
        policy, None, [2], kv_bytes=2**30, page_tokens=16, max_sequences=16, prefill_tokens=4096
    )  # fmt: skip
    return list(engine.generate([Request(Prompt(i, "", p), 4, 96, Sampling(), 0, 0) for i, p in enumerate(prompts)]))


@torch.no_grad()
def logprobs(policy: Policy, groups: list[Group]) -> torch.Tensor:
    found = []
    for group in groups:
        for t in group.trajectories:
            whole = torch.cat((torch.tensor(group.prompt.tokens), t.tokens))
            plan = PackedPlan([len(whole)], CPU)
            hidden = policy.hidden(whole, plan.positions, plan)[len(group.prompt.tokens) - 1 : -1]
            found.append(policy.head.token_stats(hidden, t.tokens, 1.0, 1024).logprobs)
    return torch.cat(found)


def sum_in_halves(model: Any, halves: bool) -> None:
    """Products in float32, rounded once, as on tensor cores; the inner dimension in one piece or in two."""

    def product(linear: torch.nn.Linear) -> Any:
        def forward(x: torch.Tensor) -> torch.Tensor:
            x, w = x.float(), linear.weight.float()
            k = x.shape[-1] // 2 + 7 if halves else x.shape[-1]
            return (x[..., :k] @ w[:, :k].t() + x[..., k:] @ w[:, k:].t()).to(torch.bfloat16)

        return forward

    for module in model.model.modules():
        if type(module) is torch.nn.Linear:
            module.forward = product(module)


def keep_residual_wide(model: Any) -> None:
    """A Llama's residual in float32 and everything else as it is."""

    def wide(layer: Any) -> Any:
        def forward(hidden_states: torch.Tensor, **rest: Any) -> torch.Tensor:
            x, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states).bfloat16(), **rest)
            hidden_states = hidden_states + x.float()
            x = layer.mlp(layer.post_attention_layernorm(hidden_states).bfloat16())
            return hidden_states + x.float()

        return forward

    for layer in model.model.layers:
        layer.forward = wide(layer)
    embed, norm, rotary = model.model.embed_tokens.forward, model.model.norm.forward, model.model.rotary_emb.forward
    model.model.embed_tokens.forward = lambda tokens: embed(tokens).float()
    model.model.norm.forward = lambda x: norm(x).bfloat16()
    model.model.rotary_emb.forward = lambda x, position_ids: tuple(t.bfloat16() for t in rotary(x, position_ids))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gsm8k", required=True)
    args = parser.parse_args()
    folder = str(as_folder(Path(args.model), Path(tempfile.mkdtemp())))
    exact = Policy(load_model(Model(path=folder, dtype="float32"), CPU))
    groups = sample(exact, gsm8k_prompts(Path(args.gsm8k), folder, 4))
    reference = logprobs(exact, groups)

    def in_bfloat16(wide: bool, halves: bool) -> torch.Tensor:
        policy = Policy(load_model(Model(path=folder, dtype="bfloat16"), CPU), check=False)
        sum_in_halves(policy.model, halves)
        if wide:
            keep_residual_wide(policy.model)
        return logprobs(policy, groups)

    runs = {(wide, halves): in_bfloat16(wide, halves) for wide in (False, True) for halves in (False, True)}
    print(f"{len(reference)} tokens, mean log-prob {reference.mean():.3f}; mean distance in nats:")
    for wide in (False, True):
        name = "float32" if wide else "bfloat16"
        error, gap = ((runs[wide, False] - other).abs().mean() for other in (reference, runs[wide, True]))
        print(f"residual in {name}: {error:.4f} from float32, {gap:.4f} between two orders of summation")
    print(f"one of each: {(runs[False, False] - runs[True, True]).abs().mean():.4f}")


if __name__ == "__main__":
    main()
