"""What an engine is: prompts in, finished groups out, one set of weights at a time.

Every engine promises: the same request gives the same tokens whatever else is in flight (sampling is keyed by the request,
not by the batch); a group is yielded once, whole, as soon as its last sample ends; tokens carry the policy version that made
them; nothing computed under an older version is reused under a newer one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from trimtab.base.errors import EngineError
from trimtab.config.learn import Sampling
from trimtab.data.prompt import Prompt
from trimtab.rollout.stops import decode_all
from trimtab.rollout.trajectory import Group, Trajectory


@dataclass(frozen=True)
class Request:
    """Draw `samples` completions of a prompt. (seed, step, prompt id, sample, position) keys every random number."""

    prompt: Prompt
    samples: int
    max_new_tokens: int | Sequence[int]
    """One limit for every sample, or one for each."""
    sampling: Sampling
    seed: int
    step: int
    first_sample: int = 0
    """Number of the first sample; a prompt that comes twice in a step goes on counting, so that its samples differ."""
    first_position: int = 0
    """Position of the first new token; a completion that is continued goes on counting, so that no random number comes twice."""

    @property
    def limits(self) -> list[int]:
        """Most new tokens of each sample."""
        if isinstance(self.max_new_tokens, int):
            return [self.max_new_tokens] * self.samples
        assert len(self.max_new_tokens) == self.samples
        return list(self.max_new_tokens)


TAIL_SHARE = 0.25
"""With fewer sequences than this share of the slots that could be used, and none to come, decoding is in its tail."""


@dataclass
class RolloutStats:
    """What one `generate` call did. Seconds are the engine's own; the caller's time between groups is not in them."""

    sequences: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    cached_prefix_tokens: int = 0
    decode_steps: int = 0
    slots: int = 0
    peak_pages: int = 0
    total_pages: int = 0
    preempted: int = 0
    """Times a sequence lost its KV to an older one and was resumed later."""
    restarts: int = 0
    """Times the engine's process was lost and started again."""
    graph_steps: int = 0
    """Decode steps that were replays of a CUDA graph."""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    tail_s: float | None = None
    """Time of decoding with few sequences left and none to come (`TAIL_SHARE`); None where it is not known."""
    wait_s: float = 0.0
    """Time in which the engine had nothing to do but wait for environments."""

    def add(self, other: RolloutStats) -> None:
        """What this call and another did together."""
        for name in ("slots", "peak_pages", "total_pages"):
            setattr(self, name, max(getattr(self, name), getattr(other, name)))
        for name in (
            "sequences", "generated_tokens", "prefill_tokens", "cached_prefix_tokens", "decode_steps", "preempted", "restarts",
            "graph_steps", "prefill_s", "decode_s", "wait_s",
        ):  # fmt: skip
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.tail_s is not None:
            self.tail_s = (self.tail_s or 0.0) + other.tail_s

    @property
    def occupancy(self) -> float:
        """Tokens that decode steps brought (a sequence's first comes with its prompt) over what all slots would have."""
        return max(0, self.generated_tokens - self.sequences) / max(1, self.decode_steps * self.slots)

    @property
    def graph_share(self) -> float:
        return self.graph_steps / max(1, self.decode_steps)

    @property
    def kv_usage(self) -> float:
        return self.peak_pages / max(1, self.total_pages)


class Sampler(Protocol):
    """Whoever turns requests into groups: an engine, or an engine that talks with an environment."""

    stats: RolloutStats
    """What the latest `generate` did."""

    def generate(self, requests: Sequence[Request]) -> Iterator[Group]:
        """Yield every request's group once, in the order they finish."""
        ...


class Engine(Sampler, Protocol):
    """One rollout engine."""

    @property
    def description(self) -> str:
        """What runs, in words for the user."""
        ...

    @property
    def non_torch_bytes(self) -> int:
        """Device memory held now that torch's allocator does not know of."""
        ...

    def lend(self) -> None:
        """Rollout is over for now: give up memory that the update can use, where the engine was made to."""
        ...

    def publish(self, version: int) -> None:
        """From now on generate with the trainer's current weights, known as `version`."""
        ...

    def shrink(self, least_tokens: int) -> tuple[int, int] | None:
        """Permanently give up part of the KV cache, keeping enough for one sequence of `least_tokens` tokens. Returns its bytes
        before and after; None where nothing can be given up, or the update has the memory anyway."""
        ...

    @property
    def lowered(self) -> dict[str, int]:
        """What is lower than the engine was made with, because memory ran out."""
        ...

    def lower(self, limits: Mapping[str, int], least_tokens: int) -> None:
        """Apply limits that an earlier session reported as `lowered`, keeping enough KV cache for one sequence of `least_tokens`
        tokens."""
        ...

    def close(self) -> None:
        """Free memory and processes."""
        ...


def check_requests(requests: Sequence[Request], context_tokens: int, vocab_size: int) -> Sampling:
    """Refuse what no engine can serve, before any work is done; the sampling that all requests share."""
    if not requests:
        raise EngineError("generate was called without requests")
    if len({r.sampling.model_dump_json() for r in requests}) > 1:
        raise EngineError("the requests of one generate call must share their sampling settings")
    for request in requests:
        if not request.prompt.tokens or request.samples < 1 or min(request.limits) < 1:
            raise EngineError(
                f"prompt {request.prompt.id}: a request needs at least one prompt token, one sample and one new token"
            )
        if max(request.prompt.tokens) >= vocab_size:
            raise EngineError(
                f"prompt {request.prompt.id} contains token {max(request.prompt.tokens)}, but the model has embeddings for "
                f"{vocab_size} tokens. Remove such tokens from the data, or resize the embedding (resize_token_embeddings)"
            )
        if len(request.prompt.tokens) + max(request.limits) > context_tokens:
            raise EngineError(
                f"prompt {request.prompt.id} has {len(request.prompt.tokens)} tokens; with max_new_tokens "
                f"{max(request.limits)} that exceeds the model's context of {context_tokens} tokens"
            )
    return requests[0].sampling


def refuse_while(generating: bool, what: str) -> None:
    """No engine changes under a `generate` that is not finished."""
    if generating:
        raise EngineError(
            f"{what} was called before the previous generate finished. Exhaust or close its iterator first"
        )


def whole_group(request: Request, trajectories: list[Trajectory], index: int, tokenizer: Any) -> Group:
    """All samples of a request in order, with their texts where there is a tokenizer."""
    trajectories.sort(key=lambda t: t.sample)
    if tokenizer is not None:
        texts = decode_all(tokenizer, [t.tokens.tolist() for t in trajectories])
        for trajectory, text in zip(trajectories, texts):
            trajectory.text = text
    return Group(request.prompt, trajectories, index)
