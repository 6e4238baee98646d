"""Numbers as a page gets them: columns as little-endian float32 in base64, everything else as JSON without NaN."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def column(values: Any) -> dict[str, Any]:
    """`{"f32", "n"}`; NaN is missing."""
    data = np.asarray(values, dtype="<f4")
    return {"f32": base64.b64encode(data.tobytes()).decode("ascii"), "n": len(data)}


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
