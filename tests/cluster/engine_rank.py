"""A rank that has an engine and nothing else: `main` is what a process of test_fleet.py runs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tiny import tiny_model, tiny_tokenizer

from trimtab.cluster.feed import DriverFeed
from trimtab.cluster.serve import Link, Orders, serve
from trimtab.model.policy import Policy
from trimtab.rollout.engine import Request
from trimtab.rollout.feed import Bounds
from trimtab.rollout.native.engine import NativeEngine


def make_engine(policy: Policy, **changes: Any) -> NativeEngine:
    settings = {"kv_bytes": 2**20, "page_tokens": 4, "max_sequences": 64, "prefill_tokens": 64, **changes}
    return NativeEngine(policy, tiny_tokenizer(), [2], **settings)


class EngineRank(Orders):
    """Each public method is an order."""

    def __init__(self, setup: Any, link: Link) -> None:
        torch.set_num_threads(1)
        self._link, self._policy = link, Policy(tiny_model("llama"))
        self._sleep_s = 0.0
        self.build({}, 0.0)

    def ready(self) -> None:
        pass

    def build(self, settings: dict[str, Any], sleep_s: float) -> None:
        """Another engine, that takes so long for a step."""
        self._engine = make_engine(self._policy, **settings)
        run, self._engine._decoder.run = self._engine._decoder.run, lambda *a: (time.sleep(sleep_s), run(*a))[1]

    def generate(self, requests: Sequence[Request], bounds: Bounds) -> Iterator[Any]:
        with DriverFeed(self._link, bounds, sum(request.samples for request in requests)) as feed:
            yield from self._engine.generate(requests, feed)
        yield self._engine.stats
        yield self._engine.lowered
        assert self._engine.pool.held == 0

    def facts_of_shortage(self) -> None:
        pass


def main(descriptor: str) -> None:
    serve(descriptor, EngineRank)
