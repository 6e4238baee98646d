"""Fills in every `auto` of `run` from the model, the work and the memory there is, and says why in one line each.

Nothing chosen here changes what is learned. Choices err towards fitting: the update is planned into half of what is free.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from trimtab.config.run import Rollout, Run
from trimtab.errors import ConfigError, Problem

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
    lendable: bool = False
    """Device memory can be given up and taken back at the same addresses."""


def pick_device(run: Run) -> torch.device:
    if run.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if run.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError([Problem("run.device", "torch sees no CUDA device on this machine", "Write auto or cpu.")])
    return torch.device(run.device)


def pick_reward_workers(run: Run) -> int:
    """Known before the model is: rewards are tried first."""
    return max(1, min(8, physical_cores())) if run.reward_workers == "auto" else run.reward_workers


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def physical_cores() -> int:
    """Cores to compute with: OMP_NUM_THREADS where the user has set it, else the physical ones this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
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
    chunk = _logprob_chunk(facts)
    in_flight = min(facts.sequences, 1024 if cuda else 256)
    page = fill(run.rollout, "run.rollout", "page_tokens", *_page_tokens(run, facts))
    lend = fill(run.rollout, "run.rollout", "lend_memory", *_lend_memory(facts))
    rollout = Rollout(
        kv_memory=fill(run.rollout, "run.rollout", "kv_memory", *_kv_memory(facts, page, lend)),
        lend_memory=lend,
        page_tokens=page,
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
        reward_workers=fill(run, "run", "reward_workers", pick_reward_workers(run), "one a core, at most eight"),
        rollout=rollout,
    )
    _refuse_small_kv(filled.rollout, facts)
    return filled, choices


def _logprob_chunk(facts: Facts) -> int:
    """Tokens whose logits, or their gradient, exist at a time: on a GPU whole tiles, enough for a product at full speed."""
    if facts.device.type != "cuda":
        return max(64, min(4096, 64 * MIB // (12 * facts.vocabulary)))
    room = min(1024 * MIB, facts.free_bytes // 32)
    return max(128, min(8192, room // (4 * facts.vocabulary) // 128 * 128))


def _page_tokens(run: Run, facts: Facts) -> tuple[int, str]:
    """On a CPU, where attention has no paged kernel, a page that holds a whole sequence spares a copy of the cache a step."""
    whole_step = facts.sequences * facts.typical_sequence * facts.kv_bytes_per_token
    roomy = run.rollout.kv_memory == "auto" and facts.longest_sequence == facts.typical_sequence
    if facts.device.type == "cpu" and roomy and 2 * whole_step <= facts.free_bytes // 2:
        return facts.typical_sequence, "one page a sequence: decoding reads it in place"
    if facts.device.type == "cuda":
        return 64, "one tile of the decode kernel"
    return 16, "little waste at the end of a sequence"


def _lend_memory(facts: Facts) -> tuple[bool, str]:
    """Rollout and update need their memory in turn, and handing it over takes milliseconds."""
    if facts.device.type != "cuda":
        return False, "one memory for all"
    if not facts.lendable:
        return False, "this device's memory cannot be lent"
    return True, "rollout and update use the same memory in turn"


def _whole_step_kv(facts: Facts, page_tokens: int) -> int:
    return int(facts.sequences * _kv_bytes(facts, page_tokens, facts.typical_sequence) * 1.05) + MIB


def _kv_memory(facts: Facts, page_tokens: int, lend: bool) -> tuple[int, str]:
    """The whole step where its share of the free memory holds it; two of the longest sequences always."""
    share, words = (4, "four fifths of the free memory, lent") if lend else (2, "two fifths of the free memory")
    room = facts.free_bytes * share // 5
    least = 2 * _kv_bytes(facts, page_tokens, facts.longest_sequence)
    wanted = _whole_step_kv(facts, page_tokens)
    chosen = (wanted, "the whole step at once") if wanted <= room else (room, words)
    return chosen if chosen[0] >= least else (least, "two of the longest sequences")


def _kv_bytes(facts: Facts, page_tokens: int, tokens: int) -> int:
    """Of one sequence, in whole pages and with the one more that a fork copies."""
    return (-(-tokens // page_tokens) + 1) * page_tokens * facts.kv_bytes_per_token


def _refuse_small_kv(rollout: Rollout, facts: Facts) -> None:
    assert rollout.kv_memory != "auto" and rollout.page_tokens != "auto"
    need = _kv_bytes(facts, rollout.page_tokens, facts.longest_sequence)
    if rollout.kv_memory < need:
        what = f"{rollout.kv_memory:,} bytes cannot hold one sequence of {facts.longest_sequence} tokens, which takes {need:,}"
        fix = f"At least {-(-need // 1024)}KiB, or auto; or lower learn.max_new_tokens."
        raise ConfigError([Problem("run.rollout.kv_memory", what, fix)])


def _token_budget(facts: Facts) -> tuple[int, bool, str]:
    """The largest useful micro-batch; activations are recomputed only where keeping them would make it small."""
    plain, why = _budget_for(facts, False)
    need = max(facts.longest_sequence, 2048) * activation_bytes_per_token(facts, False)
    if need <= facts.free_bytes // 2:
        return plain, False, why
    recomputed, why = _budget_for(facts, True)
    return recomputed, True, why


def _useful_tokens(facts: Facts) -> int:
    """Tokens of a micro-batch beyond which the update gets no faster.

    On a GPU it has to outlast the launching of its kernels. On an H200 that took 2.5 ms a layer of SmolLM2-135M, in which the
    device did 1e11 tokens x parameters of the layer; a fifth more is asked for. Gradients are added up once a micro-batch: by
    their bytes 1.5 % of its time at 16k tokens.
    """
    if facts.device.type != "cuda":
        return 4096
    of_a_layer = facts.hidden * (4 * facts.hidden + 3 * facts.intermediate)
    launched = int(1.2e11) // max(1, of_a_layer)
    return min(65536, max(16384, 1 << launched.bit_length()))


def _budget_for(facts: Facts, checkpointed: bool) -> tuple[int, str]:
    useful = _useful_tokens(facts)
    fitting = facts.free_bytes // 2 // activation_bytes_per_token(facts, checkpointed)
    if facts.longest_sequence > min(useful, fitting):
        return facts.longest_sequence, "the longest sequence has to fit"
    return (useful, "larger micro-batches gain nothing") if useful <= fitting else (fitting, "half of the free memory")
