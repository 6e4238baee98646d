"""Whether the engines of a fleet begin with whole groups, or each with samples of every prompt.

Completions of one prompt are alike in length: an engine that has the hard prompts decodes long after the others have ended. Dealt
out to all engines, samples of every prompt end alike everywhere, but each engine prefills every prompt and keeps it in its cache.

The rule, for E engines and a prompt of p tokens with s samples: each engine prefills p · (min(s, E) - 1) / E tokens more. All of
that has to take less than a hundredth of the time in which the longest completion may be decoded (the plan's time model says how
many tokens are prefilled in the time of a step), and less than a twentieth of what completions may take of the cache. Where it
does, rollouts gain most of what moving running sequences could gain at best, and none is moved (bench/fleet_moves.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from trimtab.rollout.engine import Request

MAX_SHARE_OF_DECODING = 0.01
MAX_SHARE_OF_CACHE = 0.05


def pays_to_spread(requests: Sequence[Request], engines: int, tokens_per_step: float) -> bool:
    """`tokens_per_step`: prompt tokens that an engine prefills in the time of a decode step."""
    more = sum(len(each.prompt.tokens) * (min(each.samples, engines) - 1) for each in requests) / engines
    longest = max(max(each.limits) for each in requests)
    completions = sum(sum(each.limits) for each in requests) / engines
    return more <= min(MAX_SHARE_OF_DECODING * longest * tokens_per_step, MAX_SHARE_OF_CACHE * completions)
