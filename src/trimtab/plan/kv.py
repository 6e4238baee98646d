"""Bytes of the KV cache: of single sequences, and of all that run at the same time."""

from __future__ import annotations

from trimtab.config.run import Run
from trimtab.plan.job import Job


def least_kv_bytes(job: Job, run: Run, sequences: int, page_tokens: int) -> int:
    """Bytes of so many of the longest sequences, each held whole. SGLang wants a page more for each (sglang/arguments.py)."""
    more = page_tokens if run.engine == "sglang" else 0
    return kv_bytes(job, sequences, job.longest_sequence + more, page_tokens)


def kv_bytes(job: Job, sequences: int, tokens: int, page_tokens: int) -> int:
    """Bytes of so many sequences of so many tokens, in whole pages and with the one more that a fork copies."""
    pages = -(-tokens // page_tokens) + 1
    return sequences * pages * page_tokens * job.shape.kv_elements * job.itemsize


def step_kv_bytes(job: Job, run: Run, at_once: int, page_tokens: int) -> int:
    """Bytes of the KV cache in which so many sequences of a step, or of an evaluation, run at the same time to their ends."""
    found = shared_kv_bytes(job, run, min(at_once, job.sequences), job.samples, job.completion, page_tokens)
    if not job.eval_sequences:
        return found
    evaluated = min(at_once, job.eval_sequences)  # which may be one sample of each prompt
    return max(found, shared_kv_bytes(job, run, evaluated, 1, job.eval_completion, page_tokens))


def shared_kv_bytes(job: Job, run: Run, sequences: int, samples: int, new_tokens: int, page_tokens: int) -> int:
    """Bytes of so many sequences, `samples` of each prompt. The native engine keeps a prompt's pages once, and gives each sample
    pages of its own from the one on in which the prompt ends. Of other engines this is not known, and a conversation with an
    environment shares only its first prompt: these are counted whole."""
    if run.external or job.environment:
        return kv_bytes(job, sequences, job.typical_prompt + new_tokens, page_tokens)
    groups = min(sequences, -(-sequences // samples) + (0 if sequences % samples == 0 else 1))
    shared = -(-job.typical_prompt // page_tokens)
    own = -(-(min(job.typical_prompt, page_tokens - 1) + new_tokens) // page_tokens)
    return (groups * shared + sequences * own) * page_tokens * job.shape.kv_elements * job.itemsize
