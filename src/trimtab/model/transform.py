"""What a head does to the product of hidden states and weights. The chunked head and its kernels read it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Transform(NamedTuple):
    """What becomes of the product of hidden states and weights on its way to a logit at the sampling temperature."""

    bias_V: torch.Tensor | None
    scale: float
    softcap: float | None
    temperature: float
