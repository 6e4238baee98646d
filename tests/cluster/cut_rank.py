"""A rank of an engine that is cut over several: `main` is what a process of test_cut_tokens.py runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tiny import tiny_model, tiny_tokenizer

from trimtab.cluster.feed import DriverFeed
from trimtab.cluster.serve import Link, Orders, serve
from trimtab.config.schema import Lora
from trimtab.model.adapters import add_adapters
from trimtab.model.policy import Policy
from trimtab.rollout.engine import Request
from trimtab.rollout.external.engine import kv_cut
from trimtab.rollout.feed import Bounds
from trimtab.rollout.native.cut import CutEngine
from trimtab.rollout.native.engine import NativeEngine
from trimtab.rollout.native.together import Together
from trimtab.rollout.seat import EngineMeeting, seat_of

SETTINGS = {"kv_bytes": 2**20, "page_tokens": 4, "max_sequences": 64, "prefill_tokens": 64}
CPU = torch.device("cpu")


def make_policy(architecture: str, changes: dict[str, Any], lora: bool = False) -> Policy:
    model = tiny_model(architecture, **changes)
    if not lora:
        return Policy(model)
    model = add_adapters(model, Lora(r=4, alpha=8), seed=1)
    spoil(model)
    return Policy(model)


def spoil(model: Any, seed: int = 5) -> None:
    """Weights as a step might leave them."""
    numbers = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=numbers)


def whole_engine(architecture: str, changes: dict[str, Any], lora: bool = False, **settings: Any) -> NativeEngine:
    return NativeEngine(make_policy(architecture, changes, lora), tiny_tokenizer(), [2], **{**SETTINGS, **settings})


class CutRank(Orders):
    """Each public method is an order. `setup`: rank, ranks, and where they meet."""

    def __init__(self, setup: tuple[int, int, int], link: Link) -> None:
        torch.set_num_threads(1)
        self._rank, self._ranks, self._port = setup
        self._link, self._built = link, 0

    def ready(self) -> None:
        pass

    def build(
        self, parts: int, architecture: str, changes: dict[str, Any], lora: bool, settings: dict[str, Any]
    ) -> str:
        """Another engine, of so many ranks."""
        self._built += 1
        meeting = EngineMeeting("127.0.0.1", self._port, f"test-{self._built}", "gloo")
        seat = seat_of(self._rank, ["cpu"] * self._ranks, parts, meeting)
        self._together = together = Together(seat.open_store(), seat.place, parts, CPU, "gloo")
        self._policy = make_policy(architecture, changes, lora)
        own = {**SETTINGS, "kv_parts": kv_cut(self._policy.config, parts), **settings}
        self._engine = CutEngine(self._policy, tiny_tokenizer(), [2], together=together, **own)
        return self._engine.description

    def own_bytes(self) -> int:
        return sum(p.nbytes for p in self._engine._own.model.parameters())

    def step_and_publish(self) -> None:
        spoil(self._policy.model)
        self._engine.publish(1)

    def run_short(self, rank: int, where: str, after: int) -> None:
        """Memory runs out on one rank: where, and after how many calls there."""
        if self._rank != rank:
            return
        together, decoder, calls = self._together, self._engine._decoder, [0]
        owner, name = {
            "sum": (together, "sum"),
            "run": (decoder, "run"),
            "draw": (decoder, "draw"),
            "prefill": (self._engine, "_fill_chunk"),
            "gather": (together, "gather"),
        }[where]
        original = getattr(owner, name)

        def failing(*args: Any) -> Any:
            calls[0] += 1
            if calls[0] == after:
                setattr(owner, name, original)
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
            return original(*args)

        setattr(owner, name, failing)

    def generate(self, requests: Sequence[Request], bounds: Bounds) -> Iterator[Any]:
        with DriverFeed(self._link, bounds, sum(request.samples for request in requests)) as feed:
            yield from self._engine.generate(requests, feed)
        yield self._engine.stats
        yield self._engine.lowered
        assert self._engine.pool.held == 0

    def follow(self, requests: Sequence[Request], bounds: Bounds) -> None:
        self._engine.follow(requests, bounds)
        assert self._engine.pool.held == 0

    def lowered(self) -> dict[str, int]:
        return self._engine.lowered

    def facts_of_shortage(self) -> None:
        pass


def main(descriptor: str) -> None:
    serve(descriptor, CutRank)
