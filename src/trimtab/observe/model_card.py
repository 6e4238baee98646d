"""README.md of an exported model: what it was trained on, how, and what came of it, from the run folder alone.

Names of local files and models appear without their folders, and host and user do not appear at all.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trimtab.base.errors import TrimtabError
from trimtab.base.files import write_text
from trimtab.base.package import VERSION
from trimtab.observe.curve import CURVE_FILE, plot_curve
from trimtab.observe.format import get, number, percent
from trimtab.observe.visible import visible
from trimtab.record.columns import MetricTable
from trimtab.record.reader import RunReader, open_run

CARD = "README.md"
TITLES = {
    "sft": "supervised fine-tuning",
    "reward-model": "a reward model",
}
RESULTS = (
    ("reward/mean", "mean reward in training", False),
    ("sft/loss", "loss in training (nats a token)", False),
    ("eval/pass@1", "held-out pass@1", True),
    ("eval/score", "held-out score", False),
    ("eval/loss", "held-out loss (nats a token)", False),
    ("eval/length_mean", "held-out completion length (tokens)", False),
)
SETTINGS = (
    "model.dtype", "model.lora.r", "learn.algorithm", "learn.steps", "learn.prompts_per_step", "learn.samples_per_prompt",
    "learn.sequences_per_step", "learn.max_new_tokens", "learn.max_tokens", "learn.lr", "learn.schedule.kind", "learn.kl.coef",
    "learn.sampling.temperature", "learn.seed",
)  # fmt: skip


def write_card(run: Path, folder: Path, step: int, name: str | None = None) -> Path:
    """Write the card of a model that was exported from a run's checkpoint, with a picture of its curve if one can be had."""
    reader = open_run(run, "trimtab export")
    picture = _picture(run, folder)
    path = folder / CARD
    write_text(path, card_text(reader, step, name or folder.name, picture))
    return path


def card_text(reader: RunReader, step: int, name: str, picture: str | None = None) -> str:
    """`name`: what the model is loaded by."""
    settings, facts = reader.settings(), reader.run()
    base = _value(settings, "model.path")
    stage = str(settings.get("stage") or "")
    how = TITLES.get(stage, f"reinforcement learning ({_plain(_value(settings, 'learn.algorithm') or 'grpo')})")
    title = _plain(name.rpartition("/")[2]) or "model"
    parts = [
        _front(base, stage, _value(settings, "learn.algorithm")),
        f"# {title}\n",
        f"{_code(_short(base))} after {step:,} steps of {how} with Trimtab.\n",
        _results(reader.metrics, step),
        f"![learning curve]({picture})\n" if picture else "",
        "## Load it\n",
        _loading(name),
        "## How it was trained\n",
        _table([("task", _code(_short(_value(settings, "data.train")))), *_data(settings), *_rewards(settings)]),
        _settings(settings),
        _versions(facts),
    ]
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _front(base: Any, stage: str, algorithm: Any) -> str:
    """What the Hub reads. A base model that is a folder is nobody else's to find."""
    lines = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if isinstance(base, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", base) and not Path(base).exists():
        lines.append(f"base_model: {json.dumps(base)}")
    tags = ["trimtab", stage or "reinforcement-learning", *([str(algorithm)] if algorithm and not stage else [])]
    lines += ["tags:", *(f"- {json.dumps(_plain(tag))}" for tag in tags), "---\n"]
    return "\n".join(lines)


def _results(metrics: MetricTable, step: int) -> str:
    """First and last values up to the exported step."""
    rows = []
    for metric, label, share in RESULTS:
        steps, values = metrics.points(metric)
        values = values[steps <= step]
        if len(values):
            shown = [percent(value, 1) if share else number(value) for value in (values[0], values[-1])]
            rows.append((label, shown[0], shown[1] + (_error(metrics, step) if metric == "eval/pass@1" else "")))
    if not rows:
        return ""
    lines = ["## Results\n", "| | before | after |", "|---|---|---|", *(f"| {a} | {b} | {c} |" for a, b, c in rows)]
    held_out = any(label.startswith("held-out") for label, _, _ in rows)
    note = "" if held_out else "\nThere was no held-out evaluation: the numbers are those of training.\n"
    return "\n".join(lines) + "\n" + note


def _error(metrics: MetricTable, step: int) -> str:
    steps, values = metrics.points("eval/stderr")
    values = values[steps <= step]
    return f" ± {percent(values[-1], 1)}" if len(values) else ""


def _loading(name: str) -> str:
    shown = json.dumps(_plain(name))
    return (
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"tokenizer = AutoTokenizer.from_pretrained({shown})\nmodel = AutoModelForCausalLM.from_pretrained({shown})\n```\n"
    )


def _data(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    held_out = _value(settings, "data.eval")
    return [("held-out data", _code(_short(held_out)))] if held_out else []


def _rewards(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    found = settings.get("reward")
    listed = [part for part in found if isinstance(part, Mapping)] if isinstance(found, list) else []
    words = []
    for part in listed:
        what = part.get("fn") or part.get("model") or part.get("judge") or part.get("name")
        weight = get(part, "weight") if isinstance(part.get("weight"), int | float) else None
        times = f" × {number(weight)}" if weight not in (None, 1) else ""
        words.append(_code(_short(what if isinstance(what, str) else part.get("name"))) + times)
    return [("reward", " + ".join(words))] if words else []


def _settings(settings: Mapping[str, Any]) -> str:
    rows = [(f"`{key}`", _code(_value(settings, key))) for key in SETTINGS if _value(settings, key) is not None]
    return _table(rows, "setting")


def _versions(facts: Mapping[str, Any]) -> str:
    found = [f"trimtab {facts.get('trimtab') or VERSION}"]
    found += [f"{key} {facts[key]}" for key in ("torch", "transformers") if facts.get(key)]
    device = facts.get("device")
    where = (
        f" on {device.get('count') or 1} × {device['name']}"
        if isinstance(device, Mapping) and device.get("name")
        else ""
    )
    return f"Trained with {_plain(', '.join(map(str, found)) + where)}.\n"


def _table(rows: list[tuple[str, str]], head: str = "") -> str:
    return "\n".join([f"| {head} | |", "|---|---|", *(f"| {label} | {value} |" for label, value in rows)]) + "\n"


def _value(settings: Mapping[str, Any], key: str) -> Any:
    value: Any = settings
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _short(value: Any) -> str:
    """A name as it is; of a path its last part; of rows or functions that Python gave, that."""
    text = str(value if value is not None else "-")
    if text.startswith("object:"):
        return f"{text.removeprefix('object:')} (given in Python)"
    looks_local = (
        text.startswith(("/", "~", ".", "\\")) or text.count("/") > 1 or Path(text).suffix in (".jsonl", ".json", ".py")
    )
    path, _, function = text.partition("::")
    name = re.split(r"[/\\]", path.rstrip("/\\"))[-1] if looks_local else path
    return f"{name}::{function}" if function else name


def _code(value: Any) -> str:
    """Text in a table of Markdown, as code: nothing in it is markup."""
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    return re.sub(r"[`|<>\[\]]", "'", visible(str(value)))[:200].strip()


def _picture(run: Path, folder: Path) -> str | None:
    """The curve of the run beside the card; None where there is none and it cannot be drawn."""
    target = folder / CURVE_FILE
    with suppress(TrimtabError, OSError):
        if (run / CURVE_FILE).is_file():
            shutil.copyfile(run / CURVE_FILE, target)
        else:
            plot_curve(run, target)
        return CURVE_FILE
    return None
