"""The sections in which `auto` may stand, once every value is known: `learn` by its algorithm, `run` by the planner.

Each is the section that the user writes (learn.py, run.py) with `auto` taken out of its types, and nothing else: keys and their
documentation are there (a test compares them). So whoever reads a known section never asks about `auto`, and whoever takes what
the user writes takes a known section too.
"""

from __future__ import annotations

from typing import Literal

from pydantic import StrictInt

from trimtab.config.learn import AdvantageName, AggregateName, Clip, DynamicSampling, Importance, Learn, LossName
from trimtab.config.run import Offload, Recompute, Rollout, RowRole, Run, Shard


class ResolvedClip(Clip):
    """`learn.clip` with the algorithm's bounds."""

    low: float
    high: float


class ResolvedDynamicSampling(DynamicSampling):
    """`learn.dynamic_sampling` with the algorithm's choice."""

    enabled: bool


class ResolvedImportance(Importance):
    """`learn.importance` with what staleness asks for."""

    level: Literal["off", "token", "sequence"]


class ResolvedLearn(Learn):
    """`learn` with what its algorithm stands for. Made by `algorithms.resolve`."""

    advantage: AdvantageName
    loss: LossName
    aggregate: AggregateName
    clip: ResolvedClip
    dynamic_sampling: ResolvedDynamicSampling
    importance: ResolvedImportance


class ResolvedRollout(Rollout):
    """`run.rollout` as the planner has it."""

    max_sequences: int
    kv_memory: int
    prefill_tokens: int
    page_tokens: int
    lend_memory: bool
    processes: int
    tensor_parallel: int


class ResolvedOffload(Offload):
    """`run.offload` as the planner has it."""

    optimizer: bool
    reference: bool
    activations: bool


class ResolvedRun(Run):
    """`run` as the planner has it. Made by plan/sizes.py."""

    device: Literal["cpu", "cuda"]
    devices: int
    cluster: str
    shard: Shard
    shard_devices: int
    prefetch: int
    sequence_parallel: int | dict[RowRole, int]
    tensor_parallel: int
    overlap: bool
    placement: Literal["colocated", "split"] | dict[str, StrictInt | str]
    threads: int
    engine: Literal["native", "vllm", "sglang"]
    kernels: Literal["native", "liger", "plain"]
    token_budget: int
    score_token_budget: int
    logprob_chunk: int
    checkpoint_activations: Recompute
    reward_workers: int
    offload: ResolvedOffload
    rollout: ResolvedRollout
