"""Run folders with something planted in them, for whoever looks at runs: `plant(folder, name)` for each of NAMES.

    run = plant(tmp_path / "run", "rollout_tail")          # a run of 150 steps whose rollout waits for its longest responses

The same name and seed write the same files, but for the times of `running`, `quiet` and `starting`, which count from now.
"""

from __future__ import annotations

import copy
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from tests.observe import planted_parts as parts
from tests.observe.planted_rows import BOUNDS, Columns, healthy, settle, supervised

FILES = Path(__file__).parent / "planted_files"
NAMES = (
    "healthy", *BOUNDS, "failed", "resumed", "one_step", "no_evaluation", "sft", "reward_model", "two_thousand", "ten_thousand",
    "hostile", "old_version", "running", "quiet", "starting", "damaged",
)  # fmt: skip
STARTED_AT = 1_795_000_000.0
STEPS = {
    "one_step": 1, "two_thousand": 2_000, "ten_thousand": 10_000, "starting": 0, "failed": 87, "quiet": 60, "running": 60,
}  # fmt: skip
LONG = ("two_thousand", "ten_thousand")
"""Folders that differ from the healthy one by their length alone."""
DISTINCT = tuple(name for name in NAMES if name not in {*BOUNDS, *LONG} - {"rollout_tail"})
"""One folder of each kind: those of other bounds have the same files and metrics."""
LIVE = ("running", "quiet", "starting")
NEW = ("time/at", "time/observe", "run/start", "run/tokens_total", "rollout/prefill_tokens", "rollout/decode_steps", "device/",
       "rollout/slots", "rollout/tail_s", "update/", "memory/device_used_gib", "memory/reserved_peak_gib")  # fmt: skip
"""Metrics that earlier versions did not write."""
RESUMED_AT = 91
FAST_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""A tenth of the time; for files of our own only: deep nesting would end the process."""


def plant(folder: Path, name: str, seed: int = 0) -> Path:
    """Write a run folder of this kind, and return it."""
    assert name in NAMES, name
    folder.mkdir(parents=True)
    steps, stage = STEPS.get(name, 150), name if name in ("sft", "reward_model") else "rl"
    found = (
        healthy(steps, seed, every=500 if steps > 1000 else 20)
        if stage == "rl"
        else supervised(steps, seed, stage != "sft")
    )
    changes, settings = BOUNDS.get(name, ([], {}))
    for change in changes:
        change(found)
    if name == "no_evaluation":
        found = {key: values for key, values in found.items() if not key.startswith("eval/")} | {
            "time/eval": np.zeros(steps)
        }
    started = STARTED_AT
    if name in LIVE:
        spent = float(sum(np.sum(found[key]) for key in found if key.startswith("time/"))) + 25
        started = time.time() - spent - {"quiet": 240, "starting": 20, "running": 3}[name]
    settle(found, started)
    if name == "resumed":
        found["run/start"][RESUMED_AT - 1 :] = 2
        found["time/at"][RESUMED_AT - 1 :] += 3600
    config = write_config(folder, stage, name, settings)
    write_plan(folder, config, stage, settings)
    write_metrics(folder, found, name)
    write_state(folder, found, config, stage, name, started, list(settings))
    if steps:
        write_rest(folder, found, stage, name, seed)
    ending = {"quiet": 240.0, "running": 3.0}.get(name)
    if ending:
        os.utime(folder / "metrics.jsonl", (time.time() - ending,) * 2)
    if name == "old_version":
        _make_old(folder)
    if name == "damaged":
        _damage(folder)
    return folder


def write_config(folder: Path, stage: str, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.load((FILES / "config.yaml").read_text(), FAST_LOADER)
    for key, value in settings.items():
        *above, last = key.split(".")
        at = config
        for part in above:
            at = at[part]
        at[last] = value
    config["learn"]["steps"] = STEPS[name] if name in LONG else 150
    config["observe"]["dir"] = f"runs/planted-{name}"
    if name == "no_evaluation":
        config["data"]["eval"], config["observe"]["eval_every"] = None, 0
    if name == "hostile":
        config["model"]["path"], config["data"]["system"] = parts.HOSTILE[0], "\n".join(parts.HOSTILE[:2])
    if stage != "rl":
        learn = {key: config["learn"][key] for key in ("steps", "seed", "lr", "schedule", "optimizer", "max_grad_norm")}
        size = {"sequences_per_step": 512} if stage == "sft" else {"pairs_per_step": 256}
        config = {"stage": stage.replace("_", "-")} | config | {"learn": learn | size | {"max_tokens": 1280}}
        del config["reward"], config["environment"], config["eval"]
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    return config


def write_plan(folder: Path, config: dict[str, Any], stage: str, pinned: dict[str, Any]) -> None:
    """`pinned`: keys that the user set, which the plan has not chosen."""
    plan: dict[str, Any] = json.loads((FILES / "plan.json").read_text())
    plan["choices"] = [choice for choice in plan["choices"] if choice["key"] not in pinned]
    for choice in plan["choices"]:
        value: Any = config
        for part in choice["key"].split("."):
            value = value.get(part)
        choice["value"] = value
    if stage != "rl":
        plan["phases"] = [phase for phase in plan["phases"] if phase["name"] not in ("rollout", "publish")]
        plan["step_seconds"] |= {"rollout": 0.0, "total": plan["step_seconds"]["update"]}
    (folder / "plan.json").write_text(json.dumps(plan, indent=2))


def write_metrics(folder: Path, found: Columns, name: str) -> None:
    rows: list[dict[str, Any]] = []
    if "eval/pass@1" in found and len(found["time/total"]):
        rows.append({"step": 0, "eval/pass@1": 0.36, "eval/stderr": 0.03, "eval/prompts": 256.0, "eval/length_mean": 431.0,
                     "eval/truncated": 0.02, "eval/failed": 0.0, "time/eval": 4.0, "run/start": 1.0})  # fmt: skip
    left_out = {key: np.isnan(values) for key, values in found.items()}
    for at in range(len(found["time/total"])):
        rows.append(
            {"step": at + 1} | {key: float(values[at]) for key, values in found.items() if not left_out[key][at]}
        )
    if name == "hostile":
        for row in rows:
            row[f"reward/{parts.HOSTILE[1]}"] = 0.5
    if name in ("hostile", "damaged"):
        rows[10] |= {"policy/grad_norm": None, "policy/loss": None}
    parts.write_lines(folder / "metrics.jsonl", rows)


def write_state(
    folder: Path, found: Columns, config: dict[str, Any], stage: str, name: str, started: float, pinned: list[str]
) -> None:
    """run.json, now.json, events.jsonl, and the folders of checkpoints and of the end."""
    steps, total = len(found["time/total"]), config["learn"]["steps"]
    ends = float(found["time/at"][-1]) if steps else started + 20
    state = {"failed": "failed", "quiet": "running", "running": "running", "starting": "starting"}.get(name, "finished")
    command = f"trimtab {'train' if stage == 'rl' else stage.replace('_', '-')} gsm8k.yaml learn.steps={total}"
    error = {"type": "TrainingError", "text": "the disk is full: [Errno 28] No space left on device"}
    starts = [{"number": 1, "at": started, "step": 1, "pid": 4242, "command": command}]
    if name == "resumed":
        starts.append({"number": 2, "at": float(found["time/at"][RESUMED_AT - 1]) - 40, "step": RESUMED_AT, "pid": 4711,
                       "command": f"{command} --resume"})  # fmt: skip
    run = {
        "version": 1, "stage": stage, "name": f"planted-{name}", "state": state, "error": error if state == "failed" else None,
        "resume": f"{command} --resume" if state == "failed" else None, "command": command,
        "set": ["model.path", "data.train", "data.eval", "learn.steps", "learn.prompts_per_step", "learn.samples_per_prompt",
                *pinned],
        "trimtab": "0.9.0", "python": "3.12.3", "torch": "2.13.0", "transformers": "5.20.0", "packages": {"numpy": "2.4.0"},
        "host": "planted-host", "device": {"name": "NVIDIA H200", "count": 1, "memory_bytes": 150_109_106_995},
        "git": "0123456789abcdef0123456789abcdef01234567", "starts": starts,
        "ended_at": ends if state in ("finished", "failed") else None, "steps": total, "seed": 0, "parameters": 1_543_714_304,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(run, indent=1))
    phase = {"starting": "load", "quiet": "rollout", "running": "rollout"}.get(name, "end")
    sign = time.time() - {"quiet": 240, "running": 1}.get(name, 1) if name in LIVE else ends
    counted = (
        {"done": 211, "total": 512, "unit": "samples"}
        if name in ("quiet", "running")
        else {"done": None, "total": None, "unit": None}
    )
    now = {"at": sign, "pid": 4242, "host": "planted-host", "step": steps + 1 if name in LIVE else steps, "steps": total,
           "phase": phase, "since": sign - 3, "start": len(starts)} | counted  # fmt: skip
    (folder / "now.json").write_text(json.dumps(now))
    parts.write_lines(folder / "events.jsonl", _events(found, starts, state, ends, name, error["text"]))
    for step in range(50, steps + 1, 50)[-2:]:
        (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (folder / "checkpoints" / f"step-{step}" / "config.yaml").write_text((folder / "config.yaml").read_text())
    if state == "finished":
        (folder / "final").mkdir()
        (folder / "final" / "config.json").write_text("{}")


def _events(
    found: Columns, starts: list[dict[str, Any]], state: str, ends: float, name: str, error: str
) -> list[dict[str, Any]]:
    steps, at = len(found["time/total"]), found["time/at"]
    kinds = ("start", "resume")
    events = [
        _event(start["at"], start["step"], "info", kinds[start["number"] > 1], f"start {start['number']}")
        for start in starts
    ]
    saved = range(50, min(steps, 1000) + 1, 50)
    events += [
        _event(float(at[step - 1]), step, "info", "checkpoint", f"checkpoint step-{step} is written") for step in saved
    ]
    if steps > 30:
        events.append(
            _event(
                float(at[29]), 30, "warn", "budget", "run.token_budget: 16,384 tokens stay: the device is never short"
            )
        )
        events.append(_event(float(at[30]), 31, "info", "note", "samples of step 31 took longer than usual"))
    if name == "hostile":
        events += [_event(float(at[40]), 41, "warn", "note", text) for text in parts.HOSTILE]
    if state == "failed":
        events.append(_event(ends, steps, "error", "error", error))
    if state == "finished":
        events.append(_event(ends, steps, "info", "end", "the run is finished"))
    return sorted(events, key=lambda event: float(event["at"]))


def _event(at: float, step: int, level: str, kind: str, text: str) -> dict[str, Any]:
    return {"at": at, "step": step, "level": level, "kind": kind, "text": text, "data": {}}


def write_rest(folder: Path, found: Columns, stage: str, name: str, seed: int) -> None:
    """Samples, evaluations, distributions and the trace."""
    parts.write_trace(folder / "trace.json", found, cut=name == "damaged")
    if stage != "rl":
        return
    steps, rates = len(found["time/total"]), found["reward/mean"]
    parts.write_lines(folder / "distributions.jsonl", parts.distribution_rows(found, seed))
    (folder / "samples").mkdir()
    every = 100 if steps > 1000 else 10
    lengths = found["response/length_mean"]
    train = {
        s: parts.sample_rows(s, rates[s - 1], lengths[s - 1], seed)
        for s in range(1, steps + 1)
        if s == 1 or s % every == 0
    }
    if name == "hostile":
        train = {step: parts.make_hostile(copy.deepcopy(rows)) for step, rows in train.items()}
    parts.write_samples(folder, "train", train)
    if "eval/pass@1" not in found:
        return
    scores = {0: 0.36} | {at + 1: float(score) for at, score in enumerate(found["eval/pass@1"]) if not np.isnan(score)}
    held = {step: parts.sample_rows(step, score, 415, seed, groups=32, held_out=True) for step, score in scores.items()}
    parts.write_samples(folder, "eval", held)
    parts.write_results(folder, scores, seed)


def _make_old(folder: Path) -> None:
    """The same run as an earlier version wrote it: fewer files, fewer metrics, a config without the newest keys."""
    for name in ("run.json", "now.json", "events.jsonl", "distributions.jsonl", "samples/index.jsonl"):
        (folder / name).unlink()
    for path in (folder / "eval" / "results").iterdir():
        path.unlink()
    (folder / "eval" / "results").rmdir()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if not key.startswith(NEW)} for row in rows]
    parts.write_lines(folder / "metrics.jsonl", rows)
    for path in (*folder.glob("samples/*.jsonl"), *folder.glob("eval/samples/*.jsonl")):
        new = ("group_mean", "group_std", "advantage", "answer", "task", "prompt_tokens", "chosen")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        parts.write_lines(path, [{key: value for key, value in row.items() if key not in new} for row in lines])
    plan = json.loads((folder / "plan.json").read_text())
    for key in ("profile", "assumed_lengths", "offers", "shard", "shard_devices"):
        del plan[key]
    plan["placement"] = {"shards": 1, "tensor": 1}
    (folder / "plan.json").write_text(json.dumps(plan))
    config = yaml.safe_load((folder / "config.yaml").read_text())
    for key in ("devices", "shard", "shard_devices", "prefetch"):
        del config["run"][key]
    config["learn"]["a_key_of_then"] = 3
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))


def _damage(folder: Path) -> None:
    """Lines and files that cannot be read, among others that can."""
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")
    lines[40] = lines[40][:200]
    lines[60] = b"\xff\xfe not JSON"
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines)[:-30])
    for name in ("plan.json", "run.json"):
        (folder / name).write_bytes((folder / name).read_bytes()[:300])
    for name in ("events.jsonl", "samples/index.jsonl", "samples/step-10.jsonl", "distributions.jsonl"):
        data = (folder / name).read_bytes().split(b"\n")
        data[1] = b'{"step": '
        (folder / name).write_bytes(b"\n".join(data))
    (folder / "now.json").write_bytes(b"")
