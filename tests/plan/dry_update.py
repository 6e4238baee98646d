"""The update's own code through the fused layers on a CPU, with products and kernels that allocate their results and do nothing.

Run as a script with a list of cases as JSON; prints for each the micro-batch's sizes and the most bytes that were alive beyond
what was there before it. What stands in for flash attention allocates what torch's own does: its result and its log-sum-exp; and
backwards, sums in float32 with 128 rows more a segment, and keys' and values' gradients for every query head.
"""

from __future__ import annotations

import json
import sys
import types
from importlib.machinery import ModuleSpec
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.plan.live import Live
from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.model import grouped, head, packed
from trimtab.model.policy import Policy
from trimtab.plan.shape import read_shape
from trimtab.update.batch import MicroBatch, Sample
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.updater import Updater, UpdateStats


class _Nothing:
    """Stands for whatever kernels are written with."""

    def __getattr__(self, name: str) -> _Nothing:
        return _Nothing()

    def __call__(self, *args: Any, **kwargs: Any) -> _Nothing:
        return _Nothing()


class _Kernel:
    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


def _pretend_triton() -> None:
    def module(name: str, **contents: Any) -> None:
        made = types.ModuleType(name)
        made.__spec__ = ModuleSpec(name, None)
        made.__path__ = []
        vars(made).update(contents)

        def attribute(wanted: str) -> _Nothing:
            if wanted.startswith("__"):
                raise AttributeError(wanted)
            return _Nothing()

        made.__getattr__ = attribute  # type: ignore[method-assign]
        sys.modules[name] = made

    def jit(function: Any = None, **settings: Any) -> Any:
        return _Kernel() if function is not None else lambda _: _Kernel()

    rounded = {"cdiv": lambda a, b: -(-a // b), "next_power_of_2": lambda n: 1 << (n - 1).bit_length()}
    module("triton", jit=jit, **rounded)
    for name in ("language", "language.extra", "language.extra.cuda", "tools", "tools.tensor_descriptor"):
        module(f"triton.{name}")


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, segments: int) -> torch.Tensor:
        out = q.new_empty(q.shape)
        ctx.save_for_backward(q, k, v, out, torch.empty((q.shape[1], q.shape[0])))
        ctx.segments = segments
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, _, _ = ctx.saved_tensors
        tokens = q.shape[0] + 128 * ctx.segments
        work = [torch.empty((tokens, *q.shape[1:])), torch.empty((q.shape[1], tokens))]
        if q.shape[1] != k.shape[1]:
            work += [q.new_empty((k.shape[0], *q.shape[1:])) for _ in range(2)]
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), None


def _pretend_kernels() -> None:
    from trimtab.model import layer

    def attend(self: Any, index: int, q: Any, k: Any, v: Any, rules: Any) -> torch.Tensor:
        if self._keys_seen is not None:
            k, v = self._lay_out(k, self._keys_seen), self._lay_out(v, self._keys_seen)
        out: torch.Tensor = _Attention.apply(q, k, v, len(self.lengths))
        return out

    def product(a: torch.Tensor, b: torch.Tensor, **_: Any) -> torch.Tensor:
        return a.new_empty((a.shape[0], b.shape[1]))

    packed.PackedPlan.attend = attend  # type: ignore[method-assign]
    packed._take = lambda x, rows, copies: packed._Copies.apply(x, rows, *copies())  # type: ignore[assignment]
    grouped._by_kernels = lambda _: True
    head._has_kernels = lambda hidden, weight: True
    layer.add_product = head.add_product = lambda total, a, b: None
    torch.mm = product  # type: ignore[assignment]
    torch.Tensor.__matmul__ = product  # type: ignore[assignment, method-assign]
    torch.nn.functional.linear = lambda x, weight, bias=None: product(x, weight.t())  # type: ignore[assignment]


class _Allocating:
    """Ranks that share a row, as one of them sees them: what others send is memory with nothing in it."""

    def __init__(self, rank: int, ranks: int, config: Any) -> None:
        self.rank, self.ranks = rank, ranks
        self.sizes = read_shape(config.to_dict()).attention_sizes

    def exchange(self, x: torch.Tensor, received: list[int], sent: list[int]) -> torch.Tensor:
        return x.new_empty((sum(received), *x.shape[1:]))

    def gather(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return x.new_empty((sum(counts), *x.shape[1:]))


def measure(case: dict[str, Any]) -> dict[str, int]:
    """The second of two equal micro-batches: gradients are there already."""
    from trimtab.model.fused import FusedForward

    config = AutoConfig.for_model(case["kind"], **case["config"])
    policy = Policy(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), check=False)
    policy.fused_forward = FusedForward(policy)
    policy.sequence = _Allocating(*case["sharing"], config) if "sharing" in case else None
    learn = resolve(Learn(loss="on_policy", aggregate="token_mean", steps=1))
    updater = Updater(
        policy, PolicyGradient(learn), learn, token_budget=10**9, score_token_budget=10**9, logprob_chunk=case["chunk"],
        checkpoint_activations=case["kept"],
    )  # fmt: skip
    samples = [
        Sample(
            [number % 7] * prompt,
            torch.zeros(length, dtype=torch.long),
            torch.ones(length),
            torch.ones(length),
            torch.zeros(length),
        )
        for number, (prompt, lengths) in enumerate(case["groups"])
        for length in lengths
    ]
    found = {}
    with Live(policy.model.parameters()) as live:
        policy.hidden(torch.zeros(4, dtype=torch.long), torch.arange(4), packed.PackedPlan([4], "cpu"))
        for _ in range(2):
            batch = MicroBatch.build(samples, torch.device("cpu"))
            before = live.peak = live.now
            with torch.autograd.set_multithreading_enabled(False):
                updater._loss(batch, 0.0, UpdateStats()).backward()
            if policy.sequence is not None:
                found = {"sizes": batch.sizes_on(policy.sequence), "peak": live.peak - before}
                continue
            seen = batch.plan._keys_seen
            found = {
                "tokens": len(batch.tokens_T), "predicted": len(batch.targets_R), "segments": len(batch.plan.lengths),
                "seen": len(batch.tokens_T) if seen is None else len(seen), "peak": live.peak - before,
            }  # fmt: skip
    return found


if __name__ == "__main__":
    _pretend_triton()
    _pretend_kernels()
    print(json.dumps([measure(case) for case in json.load(sys.stdin)]))
