"""From trajectories to the tensors of a forward pass. Nothing is padded and nothing is cut.

A micro-batch is one packed row. Loss lives on tokens that the model drew and nowhere else: not on prompts, not on what an
environment wrote between them. Token t of a sequence is predicted by the hidden state of token t - 1, so `predictors` are the row
positions just before each drawn token. No other token has an entry in any per-token field, so none can be counted by mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from trimtab.model.packed import PackedPlan, take_rows
from trimtab.model.policy import AnyPolicy
from trimtab.model.sequence import CutRow, OwnRows, SequenceGroup, cut_row
from trimtab.model.transfer import to_device


@dataclass
class Sample:
    """One sequence to learn from. Tensors are on the CPU; all but `tokens` and `policy_mask` have one entry a learned token."""

    prompt_tokens: list[int]
    tokens: torch.Tensor
    """Everything after the prompt."""
    advantages: torch.Tensor
    weights: torch.Tensor
    """Share of each token in the step's loss; the shares of a step were counted before anything was split."""
    engine_logprobs: torch.Tensor
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    """What a critic expected before the update."""
    returns: torch.Tensor | None = None
    policy_mask: torch.Tensor | None = None
    """bool, one entry a token: which ones the model drew, and are learned. None: all."""
    routes: torch.Tensor | None = None
    """int16, [tokens, layers, experts of a token]: experts that the engine chose where it read each token; -1: not known."""

    def __len__(self) -> int:
        """Room it takes: the prompt and all that follows, learned or not."""
        return len(self.prompt_tokens) + self.tokens.shape[0]

    @property
    def learned(self) -> int:
        """Tokens that have a share in the loss."""
        return self.tokens.shape[0] if self.policy_mask is None else int(self.policy_mask.sum())


def row_tokens(samples: Sequence[Sample]) -> int:
    """Room that samples of one prompt take in a row: the prompt once, and the completions."""
    return len(samples[0].prompt_tokens) + sum(s.tokens.shape[0] for s in samples)


def parts_by_prompt(samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
    """Samples that share a prompt, in parts that leave packing some freedom: a quarter of the budget, or one sample."""
    return list(_parts_by_prompt(samples, budget))


def _parts_by_prompt(samples: Sequence[Sample], budget: int) -> Iterator[list[Sample]]:
    groups: dict[tuple[int, ...], list[Sample]] = {}
    for sample in samples:
        groups.setdefault(tuple(sample.prompt_tokens), []).append(sample)
    for group in groups.values():
        part: list[Sample] = []
        for sample in group:
            if part and row_tokens([*part, sample]) > budget // 4:
                yield part
                part = []
            part.append(sample)
        yield part


@dataclass
class MicroBatch:
    """Samples laid end to end, and where their learned tokens lie."""

    samples: list[Sample]
    plan: PackedPlan
    tokens_T: torch.Tensor
    predictors_R: torch.Tensor
    """Row positions whose hidden states predict the R learned tokens."""
    targets_R: torch.Tensor
    sequence_R: torch.Tensor
    """Which sample each learned token belongs to."""
    predictors_on_host_R: torch.Tensor
    places: list[int] = field(default_factory=list)
    """Where each sample is among all those of its step."""
    _cuts: dict[int, CutRow] = field(default_factory=dict)
    """This rank's part of the row, by the group that shares it."""

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """Tokens, predictions, keys seen, segments and pairs of a query and a key: what memory depends on. 0: all is here."""
        plan = self.plan
        return len(self.tokens_T), len(self.targets_R), plan.keys, len(plan.lengths), plan.pairs, 0

    def sizes_on(self, group: SequenceGroup | None) -> tuple[int, int, int, int, int, int]:
        """The same of what this rank has of the row, and how many tokens the row has."""
        if group is None:
            return self.sizes
        row = self._cut(group)
        own, plan = row.own(self.predictors_on_host_R), row.plan
        return len(row.rows_S), len(own.mine), plan.keys, len(plan.lengths), plan.pairs, len(self.tokens_T)

    def _cut(self, group: SequenceGroup) -> CutRow:
        if id(group) not in self._cuts:
            self._cuts[id(group)] = cut_row(self.plan, group)
        return self._cuts[id(group)]

    def here(self, policy: AnyPolicy, values_T: torch.Tensor, instead: float) -> torch.Tensor:
        """The values of the tokens that this rank runs; `instead` for one that it runs for nothing."""
        if policy.sequence is None:
            return values_T
        row = self._cut(policy.sequence)
        found = values_T[row.rows_S.to(values_T.device)]
        return found if row.real else torch.full_like(found, instead)

    def run(self, policy: AnyPolicy, chosen: torch.Tensor | None = None) -> RowRun:
        """Hidden states that predict the learned tokens, or only the chosen of these (indices in host memory): all of them, or
        where ranks share the row, this rank's."""
        group, predictors = policy.sequence, self.predictors_on_host_R
        if group is None:
            hidden_TE = policy.hidden(self.tokens_T, self.plan.positions, self.plan)
            places = self.predictors_R if chosen is None else self.predictors_R[to_device(chosen, hidden_TE.device)]
            return RowRun(take_rows(hidden_TE, places), self.targets_R)
        row = self._cut(group)
        own = row.own(predictors if chosen is None else predictors[chosen])
        hidden_SE = policy.hidden(self.tokens_T[row.rows_S], row.plan.positions, row.plan)
        targets = self.targets_R[own.mine] if chosen is None else self.targets_R
        return RowRun(take_rows(hidden_SE, own.here), targets, own)

    @classmethod
    def build(
        cls, samples: Sequence[Sample], device: torch.device, place_of: Mapping[int, int] | None = None
    ) -> MicroBatch:
        """Each prompt is in the row once, however many of its samples there are; a completion's last learned token and what
        follows it predict nothing and are left out. `place_of`: by a sample's `id`, where it is among those of the step.

        Prompts come first, then completions, both by length: neighbours of equal length share one attention call on the CPU.
        """
        prompts: dict[tuple[int, ...], int] = {}
        for prompt in sorted((tuple(s.prompt_tokens) for s in samples), key=len):
            prompts.setdefault(prompt, len(prompts))
        ordered = sorted(samples, key=lambda s: (len(s.prompt_tokens), s.tokens.shape[0]))
        rows = [torch.tensor(prompt, dtype=torch.int64) for prompt in prompts]
        lengths = [len(prompt) for prompt in prompts]
        ends = torch.tensor(lengths).cumsum(0).tolist()
        prefixes: list[int | None] = [None] * len(prompts)
        predictors, targets, start = [], [], ends[-1]
        for sample in ordered:
            number = prompts[tuple(sample.prompt_tokens)]
            learned = _learned_places(sample)
            inside = int(learned[-1]) if len(learned) else 0
            before = torch.cat((torch.tensor([ends[number] - 1]), torch.arange(start, start + inside)))
            predictors.append(before[learned])
            targets.append(sample.tokens[learned])
            if inside:
                rows.append(sample.tokens[:inside])
                lengths.append(inside)
                prefixes.append(number)
            start += inside
        counts = [len(places) for places in targets]
        predictors_R = torch.cat(predictors)
        return cls(
            samples=ordered,
            plan=PackedPlan(lengths, device, prefixes),
            tokens_T=to_device(torch.cat(rows), device),
            predictors_R=to_device(predictors_R, device),
            predictors_on_host_R=predictors_R,
            targets_R=to_device(torch.cat(targets), device),
            # NumPy's: torch would wake a thread a core for it.
            sequence_R=to_device(torch.from_numpy(np.arange(len(ordered)).repeat(counts)), device),
            places=[] if place_of is None else [place_of[id(sample)] for sample in ordered],
        )

    def routes(self) -> torch.Tensor | None:
        """The engine's choices of experts for every token of the row, -1 where they are not known; None where none are."""
        known = next((s.routes for s in self.samples if s.routes is not None), None)
        if known is None:
            return None
        parts = []
        for sample in self.samples:
            learned = _learned_places(sample)
            inside = int(learned[-1]) if len(learned) else 0
            routes = known.new_full((inside, *known.shape[1:]), -1) if sample.routes is None else sample.routes[:inside]
            parts.append(routes)
        prompts = self.tokens_T.shape[0] - sum(part.shape[0] for part in parts)
        return torch.cat([known.new_full((prompts, *known.shape[1:]), -1), *parts])

    def gather(self, field: str) -> torch.Tensor:
        """A per-token field of the samples as one tensor on the device."""
        return to_device(torch.cat([getattr(s, field) for s in self.samples]), self.tokens_T.device)

    def scatter(self, values_R: torch.Tensor, field: str) -> None:
        """Write per-token values back to the samples, on the CPU."""
        sizes = [s.learned for s in self.samples]
        for sample, part in zip(self.samples, values_R.detach().float().cpu().split(sizes)):
            setattr(sample, field, part)


@dataclass(frozen=True)
class RowRun:
    """What a forward pass over a row gave."""

    hidden_RE: torch.Tensor
    targets_R: torch.Tensor
    """The learned tokens that these predict."""
    own: OwnRows | None = None

    def whole(self, values_R: torch.Tensor) -> torch.Tensor:
        """A number that was computed from each of the hidden states, of all of the row."""
        return values_R if self.own is None else self.own.whole(values_R)


def _learned_places(sample: Sample) -> torch.Tensor:
    """Where the learned tokens are among `tokens`."""
    return torch.arange(len(sample.tokens)) if sample.policy_mask is None else sample.policy_mask.nonzero()[:, 0]
