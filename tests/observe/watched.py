"""A view of a run that never changes, for tests of how it is drawn."""

from __future__ import annotations

from typing import Any

import numpy as np

from trimtab.observe.watch.view import RunView, newest_values
from trimtab.record.columns import MetricTable

GIB = 2**30
AT = 1_795_000_000.0


def metrics(steps: int = 120) -> MetricTable:
    table = MetricTable()
    wave = np.sin(np.arange(steps) / 3)
    rise = 1 / (1 + np.exp(-np.arange(steps) / 30))
    for step in range(1, steps + 1):
        row: dict[str, Any] = {"step": step, "reward/mean": float(rise[step - 1] - 0.2 + 0.02 * wave[step - 1])}
        row |= {
            "response/length_mean": 300 + 40 * float(wave[step - 1]),
            "time/total": 20.0,
            "rollout/tokens_per_s": 29_400.0,
        }
        row |= {
            "rollout/batch_occupancy": 0.6,
            "rollout/kv_usage": 0.77,
            "run/microbatches": 18.0,
            "run/packing_fill": 0.93,
        }
        if step % 20 == 0:
            row["eval/pass@1"] = float(rise[step - 1] - 0.1)
        table.extend([row])
    return table


def run(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": "gsm8k-20261118",
        "stage": "rl",
        "state": {"kind": "running", "text": "step 121 of 200: rollout", "phase": "rollout", "since": AT - 12, "done": 211,
                  "total": 512, "unit": "samples", "left_s": 1600.0},
        "facts": {"task": "gsm8k.jsonl", "parameters": 1.5e9, "algorithm": "GRPO", "batch": "64 prompts × 8 samples",
                  "device": "NVIDIA H200", "step": 120, "steps": 200, "seconds": 2400.0},
        "verdict": {"level": "warn", "parts": [
            {"id": "state", "text": "One warning: rollout waits for its longest responses."},
            {"id": "learning", "text": "Held-out accuracy rose from 55.0 % to 88.0 %."},
            {"id": "bound", "text": "Rollout bounds the speed, with 65 % of the time: it waits for its longest responses."},
            {"id": "next", "text": "Set learn.overlong, a soft penalty for long responses, or lower learn.max_new_tokens."},
        ]},
        "phases": {"rows": [
            {"name": "rollout", "seconds": 13.0, "share": 0.65, "planned": 6.9},
            {"name": "update", "seconds": 6.5, "share": 0.325, "planned": 7.1},
            {"name": "reward", "seconds": 0.3, "share": 0.015, "planned": None},
            {"name": "idle", "seconds": 0.2, "share": 0.01, "planned": None},
        ]},
        "memory": {"limit": 126 * GIB, "device": 140 * GIB, "phases": [
            {"name": "rollout", "measured": 37.5 * GIB, "predicted": 37.8 * GIB},
            {"name": "update", "measured": 53.2 * GIB, "predicted": 54.2 * GIB},
            {"name": "publish", "measured": None, "predicted": 20.2 * GIB},
        ]},
        "findings": [{"rule": "rollout_tail", "level": "warn", "title": "rollout waits for its longest responses",
                      "evidence": "53 % of decoding, 8.1 s a step"}],
        "events": [
            {"at": AT - 2400, "step": 1, "level": "info", "text": "started; 200 steps to do"},
            {"at": AT - 1400, "step": 50, "level": "info", "text": "checkpoint step-50 is written"},
            {"at": AT - 900, "step": 75, "level": "warn", "text": "the reward of 3 samples failed: timed out after 10 s"},
            {"at": AT - 400, "step": 100, "level": "info", "text": "checkpoint step-100 is written"},
        ],
        "damaged": [],
    }  # fmt: skip
    return found | changes


def view(**changes: Any) -> RunView:
    table = metrics()
    return RunView(run(**changes), table, newest_values(table), AT)
