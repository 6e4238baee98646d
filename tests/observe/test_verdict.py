"""The verdict names what was planted, with evidence and a remedy; healthy runs stay silent, whatever their noise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.observe.planted import plant
from tests.observe.planted_parts import write_lines
from tests.observe.planted_rows import BOUNDS
from trimtab.observe.charts import CHARTS
from trimtab.observe.gains import Outcome, gain_words
from trimtab.observe.look import look_at
from trimtab.observe.verdict import Verdict, judge

CAUSE = {
    "rollout_tail": ("rollout", "rollout_tail"),
    "rollout_batch": ("rollout", "rollout_batch"),
    "rollout_kv": ("rollout", "kv_short"),
    "rollout_launches": ("rollout", "decode_graphs"),
    "rollout_environment": ("rollout", "environment_wait"),
    "rollout_prefill": ("rollout", "rollout_prefill"),
    "reward": ("reward", "reward_share"),
    "update_small": ("update", "small_microbatches"),
    "update_host": ("update", "waits_for_host"),
    "update_offload": ("update", "update_offload"),
    "update_recompute": ("update", "update_recompute"),
}
KEYS = {
    "rollout_tail": "learn.overlong.buffer: 256",
    "rollout_batch": "run.rollout.max_sequences: auto",
    "rollout_kv": "run.rollout.kv_memory: auto",
    "rollout_launches": None,
    "rollout_environment": "run.reward_workers: 16",
    "rollout_prefill": "run.rollout.prefix_cache: true",
    "reward": "run.reward_workers: 2",
    "update_small": "run.token_budget: auto",
    "update_host": "run.token_budget: 16384",
    "update_offload": "run.offload.optimizer: auto",
    "update_recompute": "run.checkpoint_activations: auto",
}
GAINS = {"rollout_batch": 55, "rollout_kv": 15, "update_small": 35, "update_recompute": 15}


def verdict(folder: Path, name: str, seed: int = 0) -> Verdict:
    return judge(look_at(plant(folder / f"{name}-{seed}", name, seed)))


@pytest.mark.parametrize("name", BOUNDS)
@pytest.mark.parametrize("seed", [0, 1])
def test_each_planted_bound_is_named(name: str, seed: int, tmp_path: Path) -> None:
    found = verdict(tmp_path, name, seed)
    assert found.bound is not None and found.bound.cause is not None
    assert (found.bound.phase, found.bound.cause.rule) == CAUSE[name]
    said, advice = found.part("bound"), found.part("next")
    assert said is not None and advice is not None
    assert said.level == "warn" and found.level == "warn" and found.bound.cause.words in said.text
    assert said.evidence and all(item.value is not None and item.first and item.last for item in said.evidence)
    assert said.key == advice.key == KEYS[name]
    assert said.chart in {chart.id for chart in CHARTS} and advice.chart in {chart.id for chart in CHARTS}


@pytest.mark.parametrize("name", GAINS)
def test_gains_are_told_where_the_planner_knows_them(name: str, tmp_path: Path) -> None:
    part = verdict(tmp_path, name).part("next")
    assert part is not None and part.gain == f"about {GAINS[name]} % less time a step"


def test_a_key_that_costs_time_is_told_where_nothing_is_wrong(tmp_path: Path) -> None:
    """Memory is too full to call recomputing a fault, and yet it need not be."""
    folder = plant(tmp_path / "run", "update_recompute")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    write_lines(folder / "metrics.jsonl", [row | {"memory/update_peak_gib": 90.0} for row in rows])
    look = look_at(folder)
    part = judge(look).part("next")
    assert look.done.findings == [] and part is not None
    assert part.key == "run.checkpoint_activations: auto" and part.gain == "about 15 % less time a step"
    assert judge(look, ask=None).part("next") != part


def test_a_gain_of_advice_is_not_told(tmp_path: Path) -> None:
    part = verdict(tmp_path, "rollout_tail").part("next")
    assert part is not None and part.gain is None


@pytest.mark.parametrize(
    ("seconds", "words"), [(9.6, None), (9.4, "about 5 %"), (8.7, "about 15 %"), (12.0, None), (None, None)]
)
def test_gains_are_rounded_and_small_ones_are_not_told(seconds: float | None, words: str | None) -> None:
    told = gain_words(Outcome("x", ("x=1",), seconds, 10.0, None, seconds is not None))
    assert told == (words and f"{words} less time a step")
    assert gain_words(None) is None


@pytest.mark.parametrize("seed", range(8))
def test_healthy_runs_are_silent(seed: int, tmp_path: Path) -> None:
    look = look_at(plant(tmp_path / "run", "healthy", seed))
    found = judge(look)
    assert look.done.findings == [] and found.level == "ok"
    assert found.bound is not None and found.bound.cause is None
    assert found.text.startswith("Healthy. Held-out accuracy rose from 36.0 % to ")
    assert "The update bounds the speed, with 5" in found.text


@pytest.mark.parametrize(
    ("name", "level", "words"),
    [
        ("failed", "bad", "Failed at step 87 of 150: the disk is full"),
        ("quiet", "warn", "No sign for 4m 0"),
        ("starting", "unknown", "Starting: no step yet; load for"),
        ("running", "ok", "Healthy so far."),
        ("one_step", "unknown", "Too few steps to judge: 1 of 5."),
        ("no_evaluation", "ok", "There is no held-out set to compare with."),
        ("sft", "ok", "The held-out loss fell from"),
        ("reward_model", "ok", "Held-out accuracy rose from"),
        ("old_version", "ok", "Healthy."),
        ("damaged", "ok", "Healthy."),
        ("resumed", "ok", "Healthy."),
        ("hostile", "ok", "Healthy."),
    ],
)
def test_each_state_and_stage_has_its_words(name: str, level: str, words: str, tmp_path: Path) -> None:
    found = verdict(tmp_path, name)
    assert words in found.text and found.level == level


def test_a_failed_run_says_how_to_go_on(tmp_path: Path) -> None:
    part = verdict(tmp_path, "failed").part("next")
    assert part is not None and part.key == "trimtab train gsm8k.yaml learn.steps=150 --resume"


def test_a_run_says_what_it_does_and_how_long_it_will(tmp_path: Path) -> None:
    state = look_at(plant(tmp_path / "run", "running")).state
    assert (
        state.kind == "running" and state.text.startswith("step 61 of 150: rollout for 4") and state.unit == "samples"
    )
    assert (state.done, state.total) == (211, 512) and state.left_s is not None and 1300 < state.left_s < 1600


def test_nothing_of_it_needs_torch() -> None:
    code = (
        "import sys, trimtab.observe.verdict, trimtab.observe.web.report, trimtab.observe.charts, trimtab.cli.report;"
        "assert not {'torch', 'transformers', 'matplotlib', 'starlette'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
