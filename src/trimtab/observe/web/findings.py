"""Findings of the doctor as a page gets them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trimtab.observe.doctor.finding import Finding
from trimtab.observe.doctor.rules import RULES

_METRIC = {rule.id: next(iter(rule.needs), None) for rule in RULES}


def findings_of(found: Sequence[Finding]) -> list[dict[str, Any]]:
    """Each with the metric that it is about."""
    return [finding.as_json() | {"metric": _METRIC[finding.rule]} for finding in found]
