"""Numbers as a page gets them: columns as little-endian floats in base64, everything else as JSON without NaN.

A column has 4 bytes a value, unless these would lose whole units: clocks and counts of tokens have 8."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

EXACT_IN_FLOAT32 = 2.0**24
"""From here on a float32 cannot tell an integer from the next: a clock in Unix seconds would be off by up to 64."""


def needs_float64(values: NDArray[np.float64]) -> bool:
    """Whether float32 would lose whole units."""
    return bool(np.any(np.abs(values) >= EXACT_IN_FLOAT32))


def column(values: Any) -> dict[str, Any]:
    """`{"f32", "n"}` or `{"f64", "n"}`; NaN is missing."""
    data = np.asarray(values, dtype=np.float64)
    kind, dtype = ("f64", "<f8") if needs_float64(data) else ("f32", "<f4")
    return {kind: base64.b64encode(data.astype(dtype).tobytes()).decode("ascii"), "n": len(data)}


def clean(value: Any) -> Any:
    """JSON that every parser reads: what is not finite is null, keys are text, and what JSON does not know is text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [clean(item) for item in value]
    if isinstance(value, np.generic):
        return clean(value.item())
    return str(value)
