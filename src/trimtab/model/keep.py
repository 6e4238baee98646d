"""How much of a training pass is kept for its backward pass (fused.py says what each choice keeps)."""

from __future__ import annotations

from enum import Enum


class Keep(Enum):
    """What the layers of a training pass keep for their backward pass (fused.py)."""

    ALL = "all"
    SOME = "some"
    INPUT = "input"
