"""Bytes of the KV cache: of single sequences, and of all that run at the same time."""

from __future__ import annotations

from trimtab.config.known import ResolvedRun
from trimtab.config.run import Run
from trimtab.model.sizes import prompt_slots
from trimtab.plan.job import Job

STATES = "states of layers"
"""What layers other than attention carry for every sequence, of fixed size."""


def least_kv_bytes(job: Job, run: Run, sequences: int, page_tokens: int) -> int:
    """Bytes for `sequences` sequences of the longest length, each held whole. SGLang needs one more page for each."""
    more = page_tokens if run.engine == "sglang" else 0
    return kv_bytes(job, sequences, job.longest_sequence + more, page_tokens)


def kv_bytes(job: Job, sequences: int, tokens: int, page_tokens: int) -> int:
    """Bytes for `sequences` sequences of `tokens` tokens, in whole pages, plus the page that a fork copies."""
    pages = -(-tokens // page_tokens) + 1
    return sequences * pages * page_tokens * job.kv_token_bytes


def step_kv_bytes(job: Job, run: Run, at_once: int, page_tokens: int) -> int:
    """Bytes of a KV cache that holds `at_once` whole sequences of a step, or of an evaluation."""
    found = shared_kv_bytes(job, run, min(at_once, job.sequences), job.samples, job.completion, page_tokens)
    if not job.eval_sequences:
        return found
    evaluated = min(at_once, job.eval_sequences)  # which may be one sample of each prompt
    return max(found, shared_kv_bytes(job, run, evaluated, 1, job.eval_completion, page_tokens))


def shared_kv_bytes(job: Job, run: Run, sequences: int, samples: int, new_tokens: int, page_tokens: int) -> int:
    """Bytes for `sequences` sequences, `samples` of each prompt. The native engine keeps a prompt's full pages once for all its
    samples; each sample has its own pages from the page in which the prompt ends. Sequences of other engines, and conversations
    with an environment, are counted without sharing."""
    if run.external or job.environment:
        return kv_bytes(job, sequences, job.typical_prompt + new_tokens, page_tokens)
    groups = min(sequences, -(-sequences // samples) + (0 if sequences % samples == 0 else 1))
    shared = -(-job.typical_prompt // page_tokens)
    own = -(-(min(job.typical_prompt, page_tokens - 1) + new_tokens) // page_tokens)
    return (groups * shared + sequences * own) * page_tokens * job.kv_token_bytes


def carried_bytes(job: Job, run: ResolvedRun) -> int:
    """Bytes of what layers carry beside keys and values, for every sequence that an engine has room for: the native engine has an
    idle row, and prompts that wait to be forked, beside its rows."""
    rows = run.rollout.max_sequences
    return (rows if run.external else rows + 1 + prompt_slots(rows)) * job.shape.state_bytes(job.itemsize)


def kv_cut(job: Job, parts: int) -> int:
    """Devices that the KV cache is cut over: where there are fewer heads than devices, several hold the same head."""
    return min(parts, *(block.kv_heads for block in job.shape.kinds if block.kv_heads))
