"""The head of a rank that has some of the words: the logits of all are gathered from the ranks of its engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.model.head import Head
from trimtab.rollout.native.together import Together


@dataclass(frozen=True)
class CutHead(Head):
    """See head.py: this rank's words, and all of them in `logits`."""

    together: Together | None = None
    vocabulary: int = 0

    def logits(self, hidden_TE: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
        own = super().logits(hidden_TE, temperature)
        return self.gathered(own)

    @property
    def words(self) -> int:
        return self.vocabulary

    def gathered(self, own_TV: torch.Tensor, vote: bool = True) -> torch.Tensor:
        """The logits of all words from those of this rank's. `vote`: see together.py."""
        assert self.together is not None
        each = -(-self.vocabulary // self.together.parts)
        if own_TV.shape[-1] < each:
            own_TV = torch.nn.functional.pad(own_TV, (0, each - own_TV.shape[-1]))
        return self.together.gather(own_TV, vote)[..., : self.vocabulary]
