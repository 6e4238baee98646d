"""From trajectories to the tensors of a forward pass. Nothing is padded and nothing is cut.

A micro-batch is one packed row. Loss lives on completion tokens only; token t of a sequence is predicted by the hidden state
of token t - 1, so `predictors` are the row positions just before each completion token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trimtab.model.packed import PackedPlan


@dataclass
class Sample:
    """One sequence to learn from. Tensors have one entry a completion token, on the CPU."""

    prompt_tokens: list[int]
    tokens: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    """Share of each token in the step's loss; the shares of a step were counted before anything was split."""
    engine_logprobs: torch.Tensor
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.prompt_tokens) + self.tokens.shape[0]


@dataclass
class MicroBatch:
    """Samples laid end to end, and where their completion tokens lie."""

    samples: list[Sample]
    plan: PackedPlan
    tokens_T: torch.Tensor
    predictors_R: torch.Tensor
    """Row positions whose hidden states predict the R completion tokens."""
    targets_R: torch.Tensor
    sequence_R: torch.Tensor
    """Which sample each completion token belongs to."""

    @classmethod
    def build(cls, samples: Sequence[Sample], device: torch.device) -> MicroBatch:
        # Neighbours of equal length share one dense attention call on the CPU.
        ordered = sorted(samples, key=len)
        rows, predictors, start = [], [], 0
        for sample in ordered:
            prompt = len(sample.prompt_tokens)
            rows += [torch.tensor(sample.prompt_tokens, dtype=torch.int64), sample.tokens]
            predictors.append(torch.arange(start + prompt - 1, start + len(sample) - 1))
            start += len(sample)
        counts = torch.tensor([s.tokens.shape[0] for s in ordered])
        return cls(
            samples=ordered,
            plan=PackedPlan([len(s) for s in ordered], device),
            tokens_T=torch.cat(rows).to(device),
            predictors_R=torch.cat(predictors).to(device),
            targets_R=torch.cat([s.tokens for s in ordered]).to(device),
            sequence_R=torch.repeat_interleave(torch.arange(len(ordered)), counts).to(device),
        )

    def gather(self, field: str) -> torch.Tensor:
        """A per-token field of the samples as one tensor on the device."""
        return torch.cat([getattr(s, field) for s in self.samples]).to(self.tokens_T.device)

    def scatter(self, values_R: torch.Tensor, field: str) -> None:
        """Write per-token values back to the samples, on the CPU."""
        sizes = [s.tokens.shape[0] for s in self.samples]
        for sample, part in zip(self.samples, values_R.detach().float().cpu().split(sizes)):
            setattr(sample, field, part)
