"""Made-up runs: a healthy one with noise, and for each rule the change that makes a run symptom in its way and in no other."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

from trimtab.observe.doctor.record import Record
from trimtab.record.columns import MetricTable

Row = dict[str, Any]
STEPS = 120
SETTINGS: dict[str, Any] = {
    "model": {"path": "m", "dtype": "auto"},
    "reward": [{"fn": "task", "timeout_s": 10.0}, {"fn": "judge", "name": "tone", "timeout_s": 10.0}],
    "observe": {"kl_bands": {"short sums": [0.02, 0.06], "proofs": [0.08, 0.15]}},
    "learn": {
        "algorithm": "grpo",
        "steps": STEPS,
        "samples_per_prompt": 8,
        "updates_per_step": 2,
        "epochs_per_step": 1,
        "max_new_tokens": 512,
        "loss": "clip",
        "dynamic_sampling": {"enabled": True, "max_refills": 4},
    },
    "run": {
        "device": "cuda",
        "checkpoint_activations": False,
        "offload": {"optimizer": False, "reference": False, "activations": False},
        "rollout": {"max_sequences": 512},
    },
}
LEVELS = {
    "reward/zero_std_groups": 0.25,
    "reward/failed": 0.0,
    "reward/latency_max_s": 0.5,
    "reward/tone/latency_p50_s": 0.6,
    "reward/tone/latency_p95_s": 1.5,
    "reward/tone/wait_s": 0.2,
    "response/length_mean": 200.0,
    "response/length_max": 400.0,
    "response/truncated": 0.02,
    "run/samples": 512.0,
    "environment/turns_mean": 2.5,
    "environment/failed": 0.0,
    "environment/tool_malformed_share": 0.05,
    "environment/turn_limit": 0.02,
    "environment/wait_s": 0.2,
    "policy/entropy": 0.6,
    "policy/kl_ref": 0.03,
    "policy/task/short_sums/kl_ref": 0.04,
    "policy/task/proofs/kl_ref": 0.11,
    "policy/kl_old": 0.004,
    "policy/ratio_mean": 1.0,
    "policy/clip_fraction": 0.01,
    "policy/grad_norm": 0.3,
    "value/explained_variance": 0.3,
    "value/loss": 0.1,
    "value/clip_fraction": 0.02,
    "rollout/logprob_gap": 0.015,
    "rollout/refills": 0.0,
    "rollout/tokens_per_s": 40_000.0,
    "rollout/batch_occupancy": 0.7,
    "rollout/kv_usage": 0.8,
    "rollout/parked": 0.0,
    "rollout/graph_share": 1.0,
    "rollout/decode_s": 4.2,
    "rollout/prefill_s": 0.6,
    "rollout/tail_s": 0.5,
    "rollout/slots": 512.0,
    "rollout/prefill_tokens": 10_000.0,
    "rollout/cached_prefix_tokens": 70_000.0,
    "update/offload_wait_s": 0.1,
    "run/token_budget": 16_384.0,
    "run/rank_imbalance": 1.05,
    "run/rank_restarts": 0.0,
    "time/communication": 0.2,
    "run/microbatches": 8.0,
    "run/packing_fill": 0.92,
    "run/device_behind": 0.7,
    "throughput/update_mfu": 0.35,
    "run/skipped_updates": 0.0,
    "run/oom_recoveries": 0.0,
    "rollout/restarts": 0.0,
    "memory/device_total_gib": 80.0,
    "memory/update_peak_gib": 60.0,
    "memory/rollout_peak_gib": 50.0,
    "memory/host_gib": 6.0,
    "run/alloc_retries": 0.0,
    "memory/predicted_over_measured": 1.1,
    "time/rollout": 5.0,
    "time/reward": 0.3,
    "time/score": 0.5,
    "time/update": 4.0,
    "time/checkpoint": 0.1,
    "time/eval": 0.2,
    "time/idle": 0.05,
}
EXACT = (
    "run/",
    "policy/ratio_mean",
    "rollout/graph_share",
    "memory/device",
    "memory/update",
    "memory/rollout",
    "memory/pred",
)
"""Metrics that do not scatter as the others do."""


def noise(random_: random.Random, steps: int, scatter: float, memory: float) -> list[float]:
    """Factors around 1 whose neighbours have `memory` in common."""
    found, state = [], 0.0
    for _ in range(steps):
        state = memory * state + (1 - memory**2) ** 0.5 * random_.gauss(0, scatter)
        found.append(max(0.05, 1 + state))
    return found


def healthy_rows(
    steps: int = STEPS, seed: int = 0, scatter: float = 0.1, memory: float = 0.0, rises: bool = True
) -> list[Row]:
    """A run that learns (reward 0.3 to 0.7) or stays where it is, and is otherwise as it should be."""
    random_ = random.Random(seed)
    factors = {name: noise(random_, steps, scatter, memory) for name in LEVELS if not name.startswith(EXACT)}
    factors["memory/host_gib"] = noise(random_, steps, scatter / 4, memory)
    success = noise(random_, steps, scatter / 4, memory)
    rows = []
    for at in range(steps):
        row: Row = {"step": at + 1}
        row |= {name: level * factors[name][at] if name in factors else level for name, level in LEVELS.items()}
        rate = min(0.99, (0.3 + 0.4 * at / STEPS if rises else 0.4) * success[at])
        row |= {"reward/mean": rate, "reward/std": (rate * (1 - rate)) ** 0.5}
        if at % 20 == 0:
            lucky = min(
                0.05, max(-0.05, random_.gauss(0, 0.02))
            )  # never four standard errors apart, as one in thousands would be
            row |= {"eval/pass@1": rate / success[at] + lucky, "eval/stderr": 0.02}
        row["time/total"] = sum(value for name, value in row.items() if name.startswith("time/"))
        rows.append(row)
    return rows


def record(rows: list[Row], settings: Mapping[str, Any] = SETTINGS, **facts: Any) -> Record:
    return Record(settings, MetricTable(rows), **facts)


def put(
    name: str, value: Callable[[float], float | None] | float | None, share: float = 1.0
) -> Callable[[list[Row]], None]:
    """Set a metric to a function of how far the run is (0 to 1), in the last `share` of it."""

    def change(rows: list[Row]) -> None:
        first = len(rows) - round(share * len(rows))
        for at, row in enumerate(rows):
            if at >= first:
                row[name] = value(at / (len(rows) - 1)) if callable(value) else value

    return change


def together(*changes: Callable[[list[Row]], None]) -> Callable[[list[Row]], None]:
    def change(rows: list[Row]) -> None:
        for each in changes:
            each(rows)

    return change


def reward(value: Callable[[float], float]) -> Callable[[list[Row]], None]:
    """Of another kind than 0 and 1, so that no success rate follows from it; evaluations are left out."""

    def change(rows: list[Row]) -> None:
        put("reward/mean", value)(rows)
        for row in rows:
            row["reward/std"] = 0.9
            row.pop("eval/pass@1", None)

    return change


def spikes(rows: list[Row]) -> None:
    for at in (60, 80, 100):
        rows[at]["policy/grad_norm"] = 12.0


def share_of_time(phase: str, seconds: float) -> Callable[[list[Row]], None]:
    def change(rows: list[Row]) -> None:
        for row in rows:
            row["time/total"] += seconds - row[f"time/{phase}"]
            row[f"time/{phase}"] = seconds

    return change


FLAT = reward(lambda at: 0.4)
SYMPTOMS: dict[str, Callable[[list[Row]], None]] = {
    "not_finite": together(put("reward/mean", None, share=0.5), put("policy/grad_norm", None, share=0.5)),
    "reward_falls": reward(lambda at: 1.0 - at),
    "reward_flat": reward(lambda at: 0.4 + 0.05 * (-1) ** round(at * 1000)),
    "eval_behind": put("eval/pass@1", 0.3),
    "eval_past_best": put("eval/pass@1", lambda at: 0.6 - 0.8 * abs(at - 0.5)),
    "zero_signal": together(FLAT, put("reward/zero_std_groups", 0.95)),
    "refills": put("rollout/refills", 4.0),
    "reward_failed": put("reward/failed", 40.0),
    "reward_deadline": put("reward/latency_max_s", 9.0),
    "environment_failed": put("environment/failed", 40.0),
    "tool_calls_malformed": put("environment/tool_malformed_share", 0.6),
    "turn_limit": put("environment/turn_limit", 0.5),
    "environment_wait": put("environment/wait_s", 4.0),
    "truncation": put("response/truncated", lambda at: 0.01 + 0.2 * at),
    "length_grows": together(FLAT, put("response/length_mean", lambda at: 100 + 200 * at)),
    "length_collapses": together(FLAT, put("response/length_mean", lambda at: 200 - 195 * at)),
    "entropy_collapse": together(FLAT, put("policy/entropy", lambda at: 0.6 * 0.01**at)),
    "entropy_explosion": together(FLAT, put("policy/entropy", lambda at: 0.5 + 3 * at)),
    "kl_ref": together(FLAT, put("policy/kl_ref", lambda at: 0.6 * at)),
    "task_kl": put("policy/task/short_sums/kl_ref", lambda at: 0.02 + 0.06 * at),
    "slow_judge": put("reward/tone/latency_p95_s", 8.0),
    "kl_old": put("policy/kl_old", 0.05),
    "ratio": put("policy/ratio_mean", 1.3),
    "clipping": put("policy/clip_fraction", 0.2),
    "gradient_spikes": spikes,
    "gradient_drop": put("policy/grad_norm", 0.02, share=1 / 12),
    "critic_worse": put("value/explained_variance", -0.3),
    "critic_diverges": together(
        put("value/loss", lambda at: 0.1 + 0.5 * at), put("value/explained_variance", lambda at: 0.3 - 0.2 * at)
    ),
    "skipped_updates": put("run/skipped_updates", 1.0, share=1 / 30),
    "mismatch": put("rollout/logprob_gap", lambda at: 0.01 + 0.1 * at),
    "rollout_share": share_of_time("rollout", 30.0),
    "kv_short": put("rollout/parked", 40.0),
    "decode_graphs": put("rollout/graph_share", 0.0),
    "rollout_tail": put("rollout/tail_s", 2.5),
    "rollout_batch": together(
        put("rollout/slots", 32.0), put("rollout/batch_occupancy", 0.95), put("rollout/kv_usage", 0.3)
    ),
    "rollout_prefill": together(put("rollout/prefill_s", 3.5), put("rollout/cached_prefix_tokens", 0.0)),
    "update_offload": put("update/offload_wait_s", 2.0),
    "update_recompute": put("memory/update_peak_gib", 40.0),
    "reward_share": share_of_time("reward", 4.0),
    "small_microbatches": put("run/token_budget", 2048.0),
    "rank_imbalance": put("run/rank_imbalance", 1.8),
    "communication_share": put("time/communication", 6.0),
    "rank_restarts": put("run/rank_restarts", 1.0),
    "low_use": put("throughput/update_mfu", 0.06),
    "waits_for_host": put("run/device_behind", 0.03),
    "packing": put("run/packing_fill", 0.55),
    "idle": share_of_time("idle", 2.0),
    "checkpoint_share": share_of_time("checkpoint", 3.0),
    "eval_share": share_of_time("eval", 8.0),
    "slows_down": put("rollout/tokens_per_s", lambda at: 40_000 - 25_000 * at),
    "engine_restarts": put("rollout/restarts", 1.0, share=0.1),
    "oom_recoveries": put("run/oom_recoveries", 1.0, share=0.1),
    "memory_tight": put("memory/update_peak_gib", 79.0),
    "memory_unused": together(
        put("memory/update_peak_gib", 6.4), put("memory/rollout_peak_gib", 5.0), put("run/token_budget", 9000.0)
    ),
    "alloc_retries": put("run/alloc_retries", lambda at: round(4 * at)),
    "prediction": put("memory/predicted_over_measured", 0.8),
    "host_leak": put("memory/host_gib", lambda at: 4 + 8 * at),
}
"""By rule. `stalled` is not a matter of metrics and has its own test."""

SETTINGS_OF: dict[str, dict[str, Any]] = {
    "update_recompute": SETTINGS | {"run": SETTINGS["run"] | {"checkpoint_activations": True}}
}
"""By rule: settings without which its symptom is none."""
