"""Fills in every `auto` of `run` from the model, the work and the memory there is, and says why in one line each.

Nothing chosen here changes what is learned. Choices err towards fitting: half of what is free is left alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from trimtab.config.run import Rollout, Run

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Choice:
    """One key of `run`, the value it got, and the reason."""

    key: str
    value: Any
    why: str


@dataclass(frozen=True)
class Facts:
    """What the choices depend on."""

    device: torch.device
    free_bytes: int
    """Memory left on the device once the model and its optimizer are in place."""
    cores: int
    hidden: int
    intermediate: int
    layers: int
    vocabulary: int
    itemsize: int
    kv_bytes_per_token: int
    longest_sequence: int
    """Longest prompt that will be accepted plus longest completion."""
    typical_sequence: int
    """Longest prompt seen in the data plus longest completion."""
    sequences: int
    """Most sequences generated in one go, by a training step or an evaluation."""


def pick_device(run: Run) -> torch.device:
    if run.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(run.device)


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def physical_cores() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def activation_bytes_per_token(facts: Facts, checkpointed: bool) -> int:
    """What one token keeps alive until its backward pass: the inputs of each layer's products, or only the layer's own."""
    kept = facts.hidden if checkpointed else 14 * facts.hidden + 5 * facts.intermediate
    once = 14 * facts.hidden + 5 * facts.intermediate if checkpointed else 0
    return facts.itemsize * (kept * facts.layers + once + 4 * facts.hidden)


def resolve_run(run: Run, facts: Facts) -> tuple[Run, list[Choice]]:
    """`run` with every `auto` replaced. Pinned keys stay as they are and are not in the list."""
    choices: list[Choice] = []
    cuda = facts.device.type == "cuda"

    def fill(section: Run | Rollout, prefix: str, key: str, value: Any, why: str) -> Any:
        if getattr(section, key) != "auto":
            return getattr(section, key)
        choices.append(Choice(f"{prefix}.{key}", value, why))
        return value

    budget, checkpointed, budget_why = _token_budget(facts)
    if run.checkpoint_activations != "auto":
        budget, budget_why = _budget_for(facts, bool(run.checkpoint_activations))
    if run.token_budget != "auto":
        checkpointed = run.token_budget * activation_bytes_per_token(facts, False) > facts.free_bytes // 2
    chunk = max(64, min(4096, (256 if cuda else 64) * MIB // (12 * facts.vocabulary)))
    whole_step = facts.sequences * facts.typical_sequence * facts.kv_bytes_per_token
    one_sequence = 2 * facts.longest_sequence * facts.kv_bytes_per_token
    kv = max(one_sequence, min(int(whole_step * 1.05) + MIB, facts.free_bytes * 2 // 5))
    kv_why = "the whole step at once" if kv >= whole_step else "two fifths of the free memory"
    in_flight = min(facts.sequences, 1024 if cuda else 256)
    rollout = Rollout(
        kv_memory=fill(run.rollout, "run.rollout", "kv_memory", kv, kv_why),
        page_tokens=fill(run.rollout, "run.rollout", "page_tokens", 16, "little waste at the end of a sequence"),
        max_sequences=fill(run.rollout, "run.rollout", "max_sequences", in_flight, "as many as decode gains from"),
        prefill_tokens=fill(
            run.rollout, "run.rollout", "prefill_tokens", 16384 if cuda else 4096, "keeps the device busy"
        ),
        prefix_cache=run.rollout.prefix_cache,
    )
    filled = Run(
        device=facts.device.type,
        threads=fill(run, "run", "threads", facts.cores, "one a physical core"),
        engine=fill(run, "run", "engine", "native", "shares the trainer's weights"),
        token_budget=fill(run, "run", "token_budget", budget, budget_why),
        score_token_budget=fill(run, "run", "score_token_budget", 2 * budget, "no activations are kept"),
        logprob_chunk=fill(run, "run", "logprob_chunk", chunk, "logits of a chunk stay small"),
        checkpoint_activations=fill(
            run,
            "run",
            "checkpoint_activations",
            checkpointed,
            "activations would not fit" if checkpointed else "activations fit",
        ),
        reward_workers=fill(run, "run", "reward_workers", max(1, min(8, facts.cores)), "one a core, at most eight"),
        rollout=rollout,
    )
    return filled, choices


def _token_budget(facts: Facts) -> tuple[int, bool, str]:
    """The largest useful micro-batch; activations are recomputed only where keeping them would make it small."""
    plain, why = _budget_for(facts, False)
    need = max(facts.longest_sequence, 2048) * activation_bytes_per_token(facts, False)
    if need <= facts.free_bytes // 2:
        return plain, False, why
    recomputed, why = _budget_for(facts, True)
    return recomputed, True, why


def _budget_for(facts: Facts, checkpointed: bool) -> tuple[int, str]:
    useful = 65536 if facts.device.type == "cuda" else 4096
    fitting = facts.free_bytes // 2 // activation_bytes_per_token(facts, checkpointed)
    budget = max(facts.longest_sequence, min(useful, fitting))
    if budget == facts.longest_sequence and budget > useful:
        return budget, "the longest sequence has to fit"
    return budget, "larger micro-batches gain nothing" if budget == useful else "half of the free memory"
