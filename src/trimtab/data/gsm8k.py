"""GSM8K's answer format, so that its {question, answer} rows work as they are.

A GSM8K answer is worked reasoning that ends in a line `#### 1,234`; only that number is the answer.
"""

from __future__ import annotations

import re

_MARKED = re.compile(r"####\s*\$?\s*(-?\s?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+))")


def gsm8k_answer(text: str) -> str | None:
    """The number after the last `####`, without commas, spaces or a dollar sign; None when there is none."""
    found = _MARKED.findall(text)
    return re.sub(r"[,\s$]", "", found[-1]) if found else None
