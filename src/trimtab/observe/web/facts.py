"""The head of a run: its name, its state and what is known about it, for lists and for the strip above every page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from trimtab.base.units import GIB
from trimtab.observe.doctor.finding import worst
from trimtab.observe.look import RunLook
from trimtab.observe.verdict import ORDER, Level
from trimtab.record.jsonl import finite

TITLES = {"sft": "supervised fine-tuning", "reward_model": "reward model"}
PEAKS = tuple(f"memory/{phase}_peak_gib" for phase in ("rollout", "reward", "score", "update", "optimizer", "publish"))


def run_id(name: str, taken: set[str]) -> str:
    """Letters, digits, dots, dashes and underscores; never the same twice."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:80] or "run"
    found, number = plain, 2
    while found in taken:
        found, number = f"{plain}~{number}", number + 1
    taken.add(found)
    return found


def head(look: RunLook, id: str | None = None) -> dict[str, Any]:
    """RunHead: what a list of runs shows."""
    record, state = look.record, look.state
    findings = look.done.findings
    times = record.points("time/at")
    return {
        "id": id or run_id(look.folder.absolute().name, set()),
        "name": look.name,
        "state": state.as_json(),
        "stage": look.stage,
        "facts": facts(look),
        "level": _level(look),
        "findings": len(findings),
        "last": {
            "reward": record.now("reward/mean"),
            "score": next(
                (values[-1] for name in ("eval/pass@1", "eval/score") if (values := record.values(name))), None
            ),
            "seconds_a_step": record.now("time/total"),
            "peak_gib": peak_gib(look),
        },
        "at": times[-1][1] if times else finite(look.now.get("at")),
    }


def _level(look: RunLook) -> Level:
    kinds: dict[str, Level] = {"failed": "bad", "quiet": "warn", "starting": "unknown"}
    judged: Level = worst(look.done.findings) if len(look.record.steps) >= 5 else "unknown"
    return max(kinds.get(look.state.kind, "ok"), judged, key=ORDER.index)


def peak_gib(look: RunLook) -> float | None:
    """The highest peak of a phase; on a CPU, where no phase was measured, the most that the process tree took."""
    peaks = [max(values) for name in PEAKS if (values := look.record.values(name))]
    host = look.record.values("memory/host_gib")
    return max(peaks, default=max(host, default=None) if not look.record.on_cuda else None)


def facts(look: RunLook) -> dict[str, Any]:
    record, run, state = look.record, look.run, look.state
    starts = run.get("starts") if isinstance(run.get("starts"), list) else []
    first = starts[0] if starts and isinstance(starts[0], dict) else {}
    tokens = record.values("run/tokens_total") or [
        sum(record.values("rollout/tokens")) or sum(record.values("run/row_tokens"))
    ]
    device, devices = _device(look)
    names = ("trimtab", "python", "torch", "transformers")
    packages = run.get("packages")
    more = {str(name): str(version) for name, version in packages.items()} if isinstance(packages, dict) else {}
    return {
        "task": task(look),
        "parameters": finite(run.get("parameters")) or finite(look.plan.get("parameters")),
        "algorithm": algorithm(look),
        "batch": batch(look),
        "device": device,
        "devices": devices,
        "step": state.step,
        "steps": state.steps,
        "seconds": sum(record.values("time/total")) or None,
        "tokens": tokens[-1] or None,
        "seed": record.setting("learn.seed", 0) if "learn" in look.settings else finite(run.get("seed")),
        "started_at": finite(first.get("at")),
        "ended_at": finite(run.get("ended_at")),
        "folder": str(look.folder),
        "host": run.get("host"),
        "command": run.get("command"),
        "versions": {name: str(run[name]) for name in names if run.get(name)} | more,
    }


def task(look: RunLook) -> str | None:
    """What it learns from: the name of a built-in task, of a data set, or of a file."""
    train = look.record.setting("data.train", "")
    if not train:
        return None
    kind, _, rest = train.partition(":")
    if rest and kind in ("task", "reasoning_gym", "object"):
        return rest.replace("_", " ")
    return train if train.count("/") == 1 and not train.startswith((".", "/", "~")) else Path(train).name


def algorithm(look: RunLook) -> str | None:
    if look.stage != "rl":
        return TITLES[look.stage]
    name = look.record.setting("learn.algorithm", "")
    if not name:
        return None
    updates = look.record.updates_per_batch
    return f"{name.upper()}, {'on-policy' if updates == 1 else f'{updates} updates a batch'}"


def batch(look: RunLook) -> str | None:
    setting = look.record.setting
    if look.stage == "rl":
        prompts, samples = setting("learn.prompts_per_step", 0), setting("learn.samples_per_prompt", 0)
        return f"{prompts} prompts × {samples} samples" if prompts and samples else None
    for key, what in (("sequences_per_step", "sequences"), ("pairs_per_step", "pairs")):
        if number := setting(f"learn.{key}", 0):
            return f"{number} {what} a step"
    return None


def _device(look: RunLook) -> tuple[str | None, int | None]:
    found = look.run.get("device")
    known = found if isinstance(found, dict) else {}
    name = known.get("name") or look.plan.get("device") or look.record.setting("run.device", "")
    count = finite(known.get("count")) or finite(look.plan.get("devices"))
    if name in ("cpu", "CPU"):
        threads = look.record.setting("run.threads", 0)
        return (f"CPU, {threads} threads" if threads > 1 else "CPU"), 1
    return (str(name) if name else None), int(count) if count else None


def gib_of(value: Any) -> float | None:
    """Bytes as GiB."""
    known = finite(value)
    return None if known is None else known / GIB
