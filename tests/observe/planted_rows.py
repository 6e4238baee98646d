"""The metrics of planted runs: a healthy one on one H200, and what each plant changes in it. Arrays of one value a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Columns = dict[str, Values]
SAMPLES, GROUP, LIMIT = 512, 8, 1024
PHASES = ("rollout", "reward", "score", "update", "publish", "checkpoint", "eval", "idle")
EXACT = (
    "run/",
    "rollout/graph_share",
    "rollout/slots",
    "rollout/refills",
    "rollout/restarts",
    "rollout/parked",
    "memory/d",
)
"""Metrics that do not scatter."""
LEVELS: dict[str, float] = {
    "reward/failed": 0,
    "reward/latency_max_s": 0.05,
    "reward/repeated": 0,
    "response/length_mean": 420,
    "response/length_p50": 410,
    "response/length_p90": 610,
    "response/length_max": 760,
    "response/truncated": 0.01,
    "policy/loss": 0.01,
    "policy/grad_norm": 0.35,
    "policy/lr": 1e-6,
    "policy/kl_old": 0.0,
    "policy/ratio_mean": 1.0,
    "policy/clip_fraction": 0.0,
    "rollout/logprob_gap": 0.008,
    "rollout/prefill_s": 0.5,
    "rollout/decode_s": 6.6,
    "rollout/tail_s": 0.8,
    "rollout/graph_share": 1.0,
    "rollout/batch_occupancy": 0.58,
    "rollout/kv_usage": 0.71,
    "rollout/parked": 0,
    "rollout/restarts": 0,
    "rollout/refills": 0,
    "rollout/cached_prefix_tokens": 64_000,
    "rollout/prefill_tokens": 9_200,
    "rollout/slots": 512,
    "run/samples": SAMPLES,
    "run/samples_trained": SAMPLES,
    "run/token_budget": 16_384,
    "run/microbatches": 18,
    "run/max_microbatch_tokens": 16_300,
    "run/packing_fill": 0.93,
    "run/row_tokens": 275_000,
    "run/skipped_updates": 0,
    "run/oom_recoveries": 0,
    "run/alloc_retries": 0,
    "run/device_behind": 0.8,
    "throughput/update_mfu": 0.41,
    "memory/device_total_gib": 139.8,
    "memory/device_used_gib": 58.3,
    "memory/reserved_peak_gib": 56.0,
    "memory/rollout_peak_gib": 36.9,
    "memory/score_peak_gib": 20.2,
    "memory/update_peak_gib": 52.3,
    "memory/optimizer_peak_gib": 25.9,
    "memory/rollout_predicted_gib": 37.8,
    "memory/update_predicted_gib": 54.2,
    "memory/predicted_over_measured": 1.04,
    "memory/host_gib": 9.5,
    "memory/host_left_gib": 180,
    "device/util": 0.93,
    "device/power_w": 560,
    "device/temperature_c": 61,
    "device/clock_share": 0.98,
    "time/rollout": 7.3,
    "time/reward": 0.15,
    "time/update": 8.1,
    "time/publish": 0.02,
    "time/idle": 0.08,
    "update/forward_backward_s": 7.7,
    "update/optimizer_s": 0.3,
    "update/offload_wait_s": 0.0,
}


def healthy(steps: int, seed: int, every: int = 20) -> Columns:
    """A run that learns (reward 0.35 to 0.8), with noise, and is as it should be."""
    rng = np.random.default_rng(seed)
    scale = {name: 0.01 if name.startswith(("memory/", "device/")) else 0.06 for name in LEVELS}
    found: Columns = {}
    for name, level in LEVELS.items():
        exact = name.startswith(EXACT) or name in ("policy/lr", "policy/ratio_mean", "policy/kl_old")
        found[name] = level * (np.ones(steps) if exact else 1 + scale[name] * rng.standard_normal(steps).clip(-3, 3))
    at = np.arange(steps) / max(149, steps - 1)
    rate = 0.35 + 0.45 * (1 - np.exp(-2.2 * at)) / (1 - np.exp(-2.2))
    seen = (rate + 0.02 * rng.standard_normal(steps)).clip(0.01, 0.99)
    found |= {"reward/mean": seen, "reward/std": np.sqrt(seen * (1 - seen)), "reward/math": seen}
    silent = 0.22 + 0.25 * at + 0.03 * rng.standard_normal(steps)
    found["reward/zero_std_groups"] = silent.clip(0, 1)
    found["policy/entropy"] = (0.32 - 0.12 * at) * (1 + 0.03 * rng.standard_normal(steps))
    found["rollout/tokens"] = np.round(SAMPLES * found["response/length_mean"])
    found["rollout/decode_steps"] = np.round(found["response/length_max"])
    found["time/checkpoint"], found["time/eval"] = np.zeros(steps), np.zeros(steps)
    found["time/score"] = np.zeros(steps)
    found["time/checkpoint"][49::50] = 0.6
    _evaluate(found, rate, rng, every)
    return found


def _evaluate(found: Columns, rate: Values, rng: np.random.Generator, every: int) -> None:
    """Held-out scores after every so many steps and after the last one. The row of step 0 is made from `first`."""
    steps = len(rate)
    held = np.full(steps, np.nan)
    after = np.array(sorted({*range(every - 1, steps, every), steps - 1} if steps else ()), dtype=int)
    held[after] = (rate[after] + 0.02 + 0.012 * rng.standard_normal(len(after)).clip(-2, 2)).clip(0, 1)
    known = ~np.isnan(held)
    found["eval/pass@1"], found["eval/stderr"] = held, np.sqrt(held * (1 - held) / 256)
    for name, value in (("prompts", 256.0), ("failed", 0.0), ("length_mean", 415.0), ("truncated", 0.008)):
        found[f"eval/{name}"] = np.where(known, value, np.nan)
    found["time/eval"] = np.where(known, 4.0, 0.0)


def settle(found: Columns, start_at: float, first_step: int = 1) -> Columns:
    """What follows from the rest: totals, speeds, the clock."""
    found["time/total"] = np.sum([found[f"time/{name}"] for name in PHASES if f"time/{name}" in found], axis=0)
    found["time/observe"] = 0.002 * found["time/total"]
    found["time/at"] = start_at + 25 + np.cumsum(found["time/total"])
    if "rollout/tokens" in found:
        found["rollout/tokens_per_s"] = found["rollout/tokens"] / found["time/rollout"]
        found["throughput/tokens_per_s"] = found["rollout/tokens"] / found["time/total"]
        found["run/tokens_total"] = np.cumsum(found["rollout/tokens"])
    elif "run/row_tokens" in found:
        found["throughput/tokens_per_s"] = found["run/row_tokens"] / found["time/total"]
        found["run/tokens_total"] = np.cumsum(found["run/row_tokens"])
    found.setdefault("run/start", np.ones(len(found["time/at"])))
    return found


def supervised(steps: int, seed: int, reward_model: bool) -> Columns:
    """A run that learns from given data: only updates, and a loss that falls."""
    found = healthy(steps, seed)
    rng = np.random.default_rng(seed + 1)
    gone = (
        "reward/",
        "response/",
        "rollout/",
        "policy/entropy",
        "policy/kl",
        "policy/ratio",
        "policy/clip",
        "policy/loss",
    )
    stays = {name: values for name, values in found.items() if not name.startswith((*gone, "eval/"))}
    stays |= {name: np.zeros(steps) for name in ("time/rollout", "time/reward", "time/score", "time/publish")}
    del stays["run/samples_trained"]
    loss = (0.45 if reward_model else 1.1) + 0.7 * np.exp(-np.arange(steps) / 40)
    known = ~np.isnan(found["eval/pass@1"])
    noisy = loss * (1 + 0.03 * rng.standard_normal(steps))
    if reward_model:
        stays |= {"rm/loss": noisy, "rm/accuracy": (1.05 - 0.5 * noisy).clip(0, 1), "rm/difference": 2 - 1.5 * noisy}
        stays["rm/score_mean"] = 0.01 * rng.standard_normal(steps)
        stays["eval/accuracy"] = np.where(known, 1.03 - 0.5 * loss, np.nan)
        stays["eval/difference"] = np.where(known, 1.9 - 1.5 * loss, np.nan)
    else:
        stays |= {"sft/loss": noisy, "sft/tokens": np.full(steps, 210_000.0)}
        stays["eval/perplexity"] = np.where(known, np.exp(loss + 0.02), np.nan)
    stays["eval/loss"] = np.where(known, loss + 0.02, np.nan)
    return stays


def _scale(**changes: float | Callable[[Values], Values]) -> Callable[[Columns], None]:
    """Multiplies metrics by a factor, or applies a function; `__` stands for a slash."""

    def change(found: Columns) -> None:
        for key, by in changes.items():
            name = key.replace("__", "/")
            found[name] = by(found[name]) if callable(by) else found[name] * by

    return change


def _put(**levels: float) -> Callable[[Columns], None]:
    """New metrics, or new levels of known ones, with a little noise where that is not exact."""

    def change(found: Columns) -> None:
        rng = np.random.default_rng(7)
        steps = len(found["time/rollout"])
        for key, level in levels.items():
            name = key.replace("__", "/")
            exact = name.startswith(EXACT)
            found[name] = level * (np.ones(steps) if exact else 1 + 0.04 * rng.standard_normal(steps).clip(-3, 3))

    return change


Change = Callable[[Columns], None]
SLOW_ROLLOUT = 24.0
BOUNDS: dict[str, tuple[list[Change], dict[str, Any]]] = {
    "rollout_tail": (
        [
            _put(time__rollout=16, rollout__decode_s=15.2, rollout__tail_s=8.2, rollout__batch_occupancy=0.24),
            _put(
                response__length_mean=230, response__length_max=1010, response__length_p50=190, response__length_p90=420
            ),
            _put(rollout__decode_steps=1010),
        ],
        {},
    ),
    "rollout_batch": (
        [
            _put(
                time__rollout=SLOW_ROLLOUT, rollout__decode_s=23, rollout__batch_occupancy=0.95, rollout__kv_usage=0.3
            ),
            _put(rollout__slots=32, rollout__decode_steps=7_100, rollout__tail_s=0.5),
        ],
        {"run.rollout.max_sequences": 32},
    ),
    "rollout_kv": (
        [
            _put(time__rollout=SLOW_ROLLOUT, rollout__decode_s=19, rollout__prefill_s=4, rollout__kv_usage=0.995),
            _put(rollout__parked=90, rollout__batch_occupancy=0.7),
        ],
        {"run.rollout.kv_memory": 4_294_967_296, "run.rollout.lend_memory": False},
    ),
    "rollout_launches": ([_put(time__rollout=SLOW_ROLLOUT, rollout__decode_s=23, rollout__graph_share=0.05)], {}),
    "rollout_environment": (
        [
            _put(time__rollout=SLOW_ROLLOUT, rollout__decode_s=10, environment__wait_s=12, environment__turns_mean=3.1),
            _put(environment__turn_limit=0.02, environment__tokens_mean=120, environment__seconds=80),
            _put(environment__failed=0),
        ],
        {"environment": {"fn": "tools.py:calculator", "max_turns": 6}},
    ),
    "rollout_prefill": (
        [
            _put(
                time__rollout=SLOW_ROLLOUT, rollout__decode_s=9, rollout__prefill_s=14, rollout__prefill_tokens=500_000
            ),
            _put(rollout__cached_prefix_tokens=4_000),
        ],
        {"run.rollout.prefix_cache": False, "run.rollout.prefill_tokens": 2048},
    ),
    "reward": ([_put(time__reward=11, reward__latency_max_s=2.5)], {"run.reward_workers": 1}),
    "update_small": (
        [
            _put(time__update=19, update__forward_backward_s=18.4, throughput__update_mfu=0.17, run__token_budget=2048),
            _put(run__microbatches=142, run__max_microbatch_tokens=2040, memory__update_peak_gib=31),
            _put(memory__update_predicted_gib=32.2),
        ],
        {"run.token_budget": 2048},
    ),
    "update_host": (
        [
            _put(time__update=14, update__forward_backward_s=13.4, throughput__update_mfu=0.23, run__token_budget=8192),
            _put(run__microbatches=35, run__max_microbatch_tokens=8100, run__device_behind=0.03),
        ],
        {"run.token_budget": 8192},
    ),
    "update_offload": (
        [
            _put(
                time__update=15, update__forward_backward_s=9, update__offload_wait_s=5.4, throughput__update_mfu=0.22
            ),
            _put(memory__update_peak_gib=45),
            _put(memory__update_predicted_gib=46.8),
        ],
        {"run.offload.optimizer": True},
    ),
    "update_recompute": (
        [
            _put(time__update=12, update__forward_backward_s=11.6, throughput__update_mfu=0.28),
            _put(memory__update_peak_gib=32),
            _put(memory__update_predicted_gib=33.3),
        ],
        {"run.checkpoint_activations": True},
    ),
}
"""By plant: what changes in the metrics and in the config."""
