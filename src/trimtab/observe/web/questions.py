"""The four questions of the first screen: is it learning, what bounds it, is anything wrong, does it fit."""

from __future__ import annotations

from typing import Any

from trimtab.observe.bound import IN_WORDS
from trimtab.observe.doctor.rules import RULES
from trimtab.observe.format import gib
from trimtab.observe.learned import show
from trimtab.observe.look import RunLook
from trimtab.observe.verdict import Verdict
from trimtab.observe.web.facts import gib_of, peak_gib
from trimtab.observe.web.sections import memory

WITHOUT = "no held-out set"


def questions(look: RunLook, verdict: Verdict) -> dict[str, Any]:
    return {"learning": _learning(look, verdict), "bound": _bound(verdict), "wrong": _wrong(look), "fits": _fits(look)}


def _learning(look: RunLook, verdict: Verdict) -> dict[str, Any] | None:
    found = verdict.learning
    if found.metric is None or found.last is None:
        return None
    first, last, unit = found.first, found.last, found.unit
    if found.metric == "eval/pass@1":
        prompts = look.record.now("eval/prompts")
        note = f"pass@1 on {prompts:.0f} held-out prompts" if prompts else "pass@1 on held-out prompts"
    else:
        note = found.metric + ("" if found.held_out else f"; {WITHOUT}")
    if found.error is not None:
        note += f", ±{100 * found.error:.1f} points" if unit == "share" else f", ±{show(found.error, unit)}"
    values = [value for value in (first, last) if value is not None]
    low, high = (0.0, 1.0) if unit == "share" else (min(0.0, *values), max(*values, 0.0) or 1.0)
    spread = 1.96 * found.error if found.error is not None else None
    return {
        "value": show(last, unit) if first is None else f"{show(first, unit)} → {show(last, unit)}",
        "from": first,
        "to": last,
        "low": None if spread is None else last - spread,
        "high": None if spread is None else last + spread,
        "unit": unit,
        "note": note,
        "bar": {"min": low, "max": high, "from": first, "to": last},
    }


def _bound(verdict: Verdict) -> dict[str, Any] | None:
    bound = verdict.bound
    if bound is None:
        return None
    shares = [{"phase": phase, "share": share} for phase, share in bound.shares.items()]
    cause = f": {bound.cause.words}" if bound.cause else ""
    return {
        "value": IN_WORDS[bound.phase],
        "note": f"{100 * bound.share:.0f} % of the time",
        "detail": f"{bound.detail}{cause}",
        "cause": bound.cause.rule if bound.cause else None,
        "shares": shares,
    }


def _wrong(look: RunLook) -> dict[str, Any]:
    done = look.done
    found = {finding.rule: finding for finding in done.findings}
    rules = []
    for rule in RULES:
        finding = found.get(rule.id)
        if finding is not None:
            level, why = str(finding.level), finding.evidence
        elif rule.id in done.not_judged:
            level, why = "unjudged", done.not_judged[rule.id]
        else:
            level, why = "ok", rule.healthy
        rules.append({"rule": rule.id, "title": rule.title, "level": level, "why": why})
    counts = f"{len(done.healthy)} rules healthy, {len(done.not_judged)} not judged"
    if not found:
        value = "nothing found" if done.healthy else "not judged yet"
        return {"value": value, "note": f"{counts}:", "rules": rules}
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return {"value": f"{done.findings[0].title}{more}", "note": f"{len(found)} found, {counts}:", "rules": rules}


def _fits(look: RunLook) -> dict[str, Any] | None:
    shown = memory(look)
    used = peak_gib(look)
    phases = [phase for phase in shown["phases"] if phase["predicted"]]
    fullest = max(phases, key=lambda phase: float(phase["predicted"]), default=None)
    if used is None and fullest is None:
        return None
    planned = gib_of(fullest["predicted"]) if fullest else None
    note = (
        f"planned: {gib(planned)}, in {IN_WORDS.get(fullest['name'], fullest['name'])}"
        if fullest
        else "there is no plan"
    )
    return {"value": used, "unit": "GiB", "limit": gib_of(shown["limit"]), "planned": planned, "note": note}
