"""Fills in every `auto` of `run` from the model, the work and the memory there is, and says why in one line each.

Nothing chosen here changes what is learned. Choices err towards fitting: the update is planned into half of what is free.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Literal

import psutil
import torch

from trimtab.config.run import Offload, Rollout, Run
from trimtab.errors import ConfigError, Problem
from trimtab.model.memory import host_memory
from trimtab.update.conveyor import SLOTS
from trimtab.update.optimizer import PIECE

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
    """Memory left on the device once models, gradients and optimizer are in place; less than nothing if they do not fit."""
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
    optimizer_bytes: int = 0
    """Masters and moments, which may wait in host memory instead."""
    reference_bytes: int = 0
    """Weights of a reference policy, which may as well."""
    host_bytes: int = 0
    """Host memory that is free."""
    fused: bool = False
    """The update runs through fused layers."""
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
    return host_memory()[1]


def physical_cores() -> int:
    """Cores to compute with: OMP_NUM_THREADS where the user has set it, else the physical ones this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def _moved(facts: Facts, size: int, pieces: bool = False) -> Facts:
    """With so many bytes on the host instead of the device; on a CPU they are the same. Streaming needs room for its pieces."""
    if facts.device.type != "cuda":
        return facts
    room = SLOTS * 3 * 4 * PIECE if pieces else 0
    return replace(facts, free_bytes=facts.free_bytes + size - min(room, size), host_bytes=facts.host_bytes - size)


def _offload_optimizer(facts: Facts) -> tuple[bool, str]:
    """Where its state would leave less than a quarter of its own size to everything else."""
    if facts.device.type != "cuda":
        return False, "one memory for all"
    if facts.free_bytes >= facts.optimizer_bytes // 4:
        return False, "it fits on the device"
    if facts.host_bytes < facts.optimizer_bytes * 11 // 10:
        return False, "the host has no room for it either"
    return True, "on the device it would leave too little room"


def _offload_reference(facts: Facts) -> tuple[bool, str]:
    if facts.device.type != "cuda" or not facts.reference_bytes:
        return False, "one memory for all" if facts.reference_bytes else "there is none"
    if facts.free_bytes >= 2 * facts.reference_bytes:
        return False, "it fits on the device"
    if facts.host_bytes < facts.reference_bytes * 11 // 10:
        return False, "the host has no room for it either"
    return True, "memory is short, and it is needed once a step"


def _offload_activations(run: Run, facts: Facts) -> tuple[bool, str]:
    if facts.device.type != "cuda" or run.checkpoint_activations in (False, "some"):
        return False, "one memory for all" if facts.device.type != "cuda" else "not all are recomputed"
    tight = facts.longest_sequence * activation_bytes_per_token(facts, True) > facts.free_bytes // 2
    return tight, "the longest sequence would not fit otherwise" if tight else "they fit on the device"


Checkpointed = bool | Literal["some"]


def activation_bytes_per_token(facts: Facts, checkpointed: Checkpointed) -> int:
    """What one token keeps alive until its backward pass: the inputs of each layer's products, what attention and residuals
    need, or only the layer's own input; and what one layer makes again."""
    everything = 14 * facts.hidden + 5 * facts.intermediate
    kept = {False: everything, "some": 16 * facts.hidden, True: 2 * facts.hidden}[checkpointed]
    once = everything if checkpointed else 0
    return facts.itemsize * (kept * facts.layers + once + 4 * facts.hidden)


def resolve_run(run: Run, facts: Facts) -> tuple[Run, list[Choice]]:
    """`run` with every `auto` replaced. Pinned keys stay as they are and are not in the list."""
    choices: list[Choice] = []
    cuda = facts.device.type == "cuda"

    def fill(section: Run | Rollout | Offload, prefix: str, key: str, value: Any, why: str) -> Any:
        if getattr(section, key) != "auto":
            return getattr(section, key)
        choices.append(Choice(f"{prefix}.{key}", value, why))
        return value

    away = {"optimizer": fill(run.offload, "run.offload", "optimizer", *_offload_optimizer(facts))}
    facts = _moved(facts, facts.optimizer_bytes * away["optimizer"], pieces=away["optimizer"])
    away["reference"] = fill(run.offload, "run.offload", "reference", *_offload_reference(facts))
    facts = _moved(facts, facts.reference_bytes * away["reference"])
    facts = replace(facts, free_bytes=max(GIB // 4, facts.free_bytes))
    away["activations"] = fill(run.offload, "run.offload", "activations", *_offload_activations(run, facts))
    budget, checkpointed, budget_why = _token_budget(facts)
    if away["activations"]:
        checkpointed = True
        budget, budget_why = _budget_for(facts, True, away=True)
    elif run.checkpoint_activations != "auto":
        budget, budget_why = _budget_for(facts, run.checkpoint_activations)
    if run.token_budget != "auto" and not away["activations"]:
        checkpointed = _checkpointed(facts, run.token_budget)
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
            {False: "all activations fit", "some": "these fit", True: "activations would not fit"}[checkpointed],
        ),
        reward_workers=fill(run, "run", "reward_workers", pick_reward_workers(run), "one a core, at most eight"),
        rollout=rollout,
        offload=Offload(**away),
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


def _token_budget(facts: Facts) -> tuple[int, Checkpointed, str]:
    """The largest useful micro-batch; activations are recomputed only where keeping them would make it small."""
    checkpointed = _checkpointed(facts, max(facts.longest_sequence, 2048))
    budget, why = _budget_for(facts, checkpointed)
    return budget, checkpointed, why


def _checkpointed(facts: Facts, tokens: int) -> Checkpointed:
    """The least recomputation with which so many tokens fit."""
    tries: tuple[Checkpointed, ...] = (False, "some") if facts.fused else (False,)
    for choice in tries:
        if tokens * activation_bytes_per_token(facts, choice) <= facts.free_bytes // 2:
            return choice
    return True


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


def _budget_for(facts: Facts, checkpointed: Checkpointed, away: bool = False) -> tuple[int, str]:
    useful = _useful_tokens(facts)
    on_device = (
        replace(facts, layers=4) if away else facts
    )  # inputs of a few layers; those of all others wait on the host
    fitting = facts.free_bytes // 2 // activation_bytes_per_token(on_device, checkpointed)
    if facts.longest_sequence > min(useful, fitting):
        return facts.longest_sequence, "the longest sequence has to fit"
    return (useful, "larger micro-batches gain nothing") if useful <= fitting else (fitting, "half of the free memory")
