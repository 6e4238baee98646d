"""What a planted run has beside its metrics: samples, evaluations, distributions, a trace, events, and texts that mean harm."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.observe.planted_rows import GROUP, LIMIT, PHASES, Columns

HOSTILE = (
    "</script><script>window.planted = 1</script>",
    '<img src=x onerror="window.planted = 2">',
    "<!-- <script> -->\u202egnp.exe\u202c \u2066isolated\u2069",
    "NUL \x00, bell \x07, escape \x1b[31mred\x1b[0m, lone surrogate \ud800 and a\rreturn",
    "javascript:alert(1) [a](javascript:alert(1)) ![i](https://example.invalid/x.png) <a href='https://example.invalid'>x</a>",
    "{{constructor.constructor('window.planted = 3')()}} ${window.planted = 4} `x` \\u003cscript\\u003e",
)
TRACKS = ("phases", "events", "checkpoints", "engine", "update", "rewards")


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> int:
    """Returns the bytes written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(json.dumps(row).encode() + b"\n" for row in rows)
    path.write_bytes(data)
    return len(data)


def finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def sample_rows(
    step: int, rate: float, length: float, seed: int, groups: int = 4, held_out: bool = False
) -> list[dict[str, Any]]:
    """Groups of completions of a made-up sum; every ninth group has a sample whose reward failed."""
    rng = np.random.default_rng((seed, step, held_out))
    size = 1 if held_out else GROUP
    rows = []
    for at in range(groups):
        number = int(rng.integers(0, 40))
        a, b = 13 + number, 7 + 3 * number
        rights = rng.random(size) < rate
        rewards = [float(right) for right in rights]
        mean, std = float(np.mean(rewards)), float(np.std(rewards))
        for sample in range(size):
            tokens = int(np.clip(rng.normal(length, 0.3 * length), 5, LIMIT))
            failed = not held_out and sample == 3 and (step + at) % 9 == 0
            answer = a + b if rights[sample] else a + b + int(rng.integers(1, 9))
            rows.append(
                {
                    "step": step,
                    "prompt_id": f"train-{number}" if not held_out else f"held-{at}",
                    "sample": sample,
                    "prompt": f"Tom has {a} apples and buys {b} more. How many has he?",
                    "completion": f"He starts with {a}. He buys {b}. {a} + {b} = {answer}.\n#### {answer}",
                    "rewards": {"math": None if failed else rewards[sample]},
                    "reward": None if failed else rewards[sample],
                    "finish": "length" if tokens >= LIMIT else "stop",
                    "tokens": tokens,
                    "failure": "TimeoutError: the reward took longer than 10 s" if failed else None,
                    "group_mean": mean,
                    "group_std": std,
                    "advantage": 0.0 if std == 0 else (rewards[sample] - mean) / std,
                    "answer": str(a + b),
                    "task": None,
                    "prompt_tokens": 24,
                    "chosen": "failed" if failed else ("best", "worst", "random")[at % 3],
                }
            )
    return rows


def write_samples(folder: Path, kind: str, per_step: Mapping[int, Sequence[Mapping[str, Any]]]) -> None:
    """The files of each step, and their lines in the index."""
    where = "samples" if kind == "train" else "eval/samples"
    index = []
    for step, rows in per_step.items():
        file = f"{where}/step-{step}.jsonl"
        size = write_lines(folder / file, rows)
        rewards = [row["reward"] for row in rows if row.get("reward") is not None]
        index.append(
            {
                "step": step,
                "kind": kind,
                "file": file,
                "rows": len(rows),
                "bytes": size,
                "reward_min": min(rewards, default=None),
                "reward_mean": float(np.mean(rewards)) if rewards else None,
                "reward_max": max(rewards, default=None),
                "cut_off": sum(row.get("finish") == "length" for row in rows),
                "failed": sum(row.get("failure") is not None for row in rows),
            }
        )
    with (folder / "samples").joinpath("index.jsonl").open("ab") as file_:
        file_.write(b"".join(json.dumps(row).encode() + b"\n" for row in index))


def write_results(folder: Path, scores: Mapping[int, float], seed: int) -> None:
    """All prompts of each evaluation; harder ones are solved later."""
    rng = np.random.default_rng(seed)
    hardness = rng.permutation(256) / 256
    for step, score in scores.items():
        rights = hardness < score
        rows = (
            {"prompt_id": f"held-{at}", "right": bool(right), "reward": float(right), "tokens": 380 + at % 90, "samples": 1,
             "rights": int(right)}
            for at, right in enumerate(rights)
        )  # fmt: skip
        write_lines(folder / "eval" / "results" / f"step-{step}.jsonl", rows)


def distribution_rows(found: Columns, seed: int) -> Iterable[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    edges = [round(float(edge), 3) for edge in np.geomspace(1, LIMIT, 65)]
    for at, rate in enumerate(found["reward/mean"]):
        lengths = rng.normal(found["response/length_mean"][at], 110, 512).clip(1, LIMIT)
        right = rng.binomial(GROUP, rng.beta(2 * rate, 2 * (1 - rate), 64))
        rewards = np.histogram(np.repeat([0.0, 1.0], [512 - right.sum(), right.sum()]), bins=32, range=(0, 1))
        advantages = np.histogram(rng.normal(0, 1, 512), bins=32, range=(-4, 4))
        yield {
            "step": at + 1,
            "lengths": {"edges": edges, "counts": np.histogram(lengths, bins=edges)[0].tolist()},
            "rewards": {"edges": rewards[1].round(5).tolist(), "counts": rewards[0].tolist()},
            "groups": {"right": np.bincount(right, minlength=GROUP + 1).tolist()},
            "advantages": {"edges": advantages[1].round(5).tolist(), "counts": advantages[0].tolist()},
        }


def write_trace(path: Path, found: Columns, cut: bool = False) -> None:
    """Phases of every step; inside of the first 20 also rounds of the engine, micro-batches and counters."""
    head: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "trimtab"}}]
    head += [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in enumerate(TRACKS, start=1)
    ]
    lines = ["[" + ",\n".join(map(json.dumps, head))]
    for at, end in enumerate(found["time/at"]):
        step, start = at + 1, end - found["time/total"][at]
        lines.append(_span(f"step {step}", start, found["time/total"][at], 1, {"step": step}))
        for name in PHASES[:-1]:
            seconds = found[f"time/{name}"][at] if f"time/{name}" in found else 0.0
            if seconds <= 0:
                continue
            lines.append(_span(name, start, seconds, 1, {"step": step}))
            if step <= 20:
                lines += _inside(name, start, seconds, step)
            start += seconds
        if step % 50 == 0:
            lines.append(_span("checkpoint", end, 3.1, 3, {"step": step}))
    text = "\n".join([lines[0], *("," + line for line in lines[1:])]) + "\n"
    path.write_text(text[:-40] if cut else text)


def _inside(phase: str, start: float, seconds: float, step: int) -> list[str]:
    if phase == "update":
        part = seconds / 20
        spans = [
            _span("micro-batch", start + i * part, 0.9 * part, 5, {"step": step, "tokens": 16_000}) for i in range(18)
        ]
        return [*spans, _span("optimizer", start + 19 * part, 0.8 * part, 5, {"step": step})]
    if phase != "rollout":
        return []
    part = seconds / 12
    found = [_span("prefill", start, part, 4, {"step": step})]
    for i in range(1, 12):
        found.append(_span("decode", start + i * part, 0.98 * part, 4, {"step": step, "rounds": 64}))
        at = {"ph": "C", "ts": round((start + i * part) * 1e6), "pid": 1}
        running = max(4, round(512 * (1 - (i / 12) ** 3)))
        found.append(json.dumps({"name": "running sequences", "args": {"value": running}} | at))
        found.append(json.dumps({"name": "KV pages", "args": {"value": 9 * running}} | at))
    return found


def _span(name: str, start: float, seconds: float, tid: int, args: Mapping[str, Any]) -> str:
    at = {"ts": round(start * 1e6), "dur": round(seconds * 1e6), "pid": 1, "tid": tid}
    return json.dumps({"name": name, "ph": "X", **at, "args": dict(args)})


def make_hostile(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same samples with texts that mean harm; one has a megabyte in a line."""
    for at, row in enumerate(rows):
        text = HOSTILE[at % len(HOSTILE)]
        row |= {
            "prompt": f"{text} {row['prompt']}",
            "completion": text,
            "answer": text,
            "prompt_id": f"{text}-{at // GROUP}",
        }
        row["rewards"] = {HOSTILE[0]: row["reward"]}
        if row["failure"]:
            row["failure"] = text
    rows[0]["completion"] = "x" * 1_000_000 + HOSTILE[0]
    return rows


def plant_samples(folder: Path, steps: int, size: int) -> Path:
    """Replace the samples of a run by 200 files of `size` bytes in all."""
    first = next(path for path in sorted((folder / "samples").glob("step-*.jsonl")) if path.name != "step-1.jsonl")
    rows, files, index = [json.loads(line) for line in first.read_text().splitlines()], 200, []
    for row in rows:
        row["completion"] = "tokens and more tokens " * (size // files // len(rows) // 23)
    for number in range(1, files + 1):
        step = number * steps // files
        written = write_lines(folder / "samples" / f"step-{step}.jsonl", [row | {"step": step} for row in rows])
        index.append({"step": step, "kind": "train", "rows": len(rows), "bytes": written, "failed": 1})
    write_lines(folder / "samples" / "index.jsonl", index)
    return folder
