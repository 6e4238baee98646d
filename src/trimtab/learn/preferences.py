"""Which of two answers is better: Bradley and Terry 1952, as reward models are trained.

With s+ and s- the scores of the better and the worse answer and m how much better it is at least:

    loss = -log sigmoid(s+ - s- - m) + center (s+ + s-)^2       the margin: Touvron et al. 2023, arXiv 2307.09288
                                                                the second term: Eisenstein et al. 2023, arXiv 2312.09244
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def preference_loss(better: Tensor, worse: Tensor, margins: Tensor, center: float = 0.0) -> Tensor:
    """[P]: one number a pair."""
    return -F.logsigmoid(better - worse - margins) + center * (better + worse).square()
