"""Every rule finds what it is for, and none takes noise, a short run or a healthy one for it."""

from __future__ import annotations

import subprocess
import sys
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.observe.symptoms import (
    SETTINGS,
    SETTINGS_OF,
    STEPS,
    SYMPTOMS,
    healthy_rows,
    put,
    record,
    reward,
    share_of_time,
    together,
)
from trimtab.config.reference import slot
from trimtab.observe.doctor.examine import examine
from trimtab.observe.doctor.finding import Finding, is_healthy
from trimtab.observe.doctor.record import Record
from trimtab.observe.doctor.rules import RULES

BY_ID = {rule.id: rule for rule in RULES}
FROM_ONE_STEP = {"stalled", "not_finite", "skipped_updates", "oom_recoveries", "engine_restarts"}
FROM_TWO_EVALUATIONS = {"eval_past_best"}


def found(run: Record) -> dict[str, Finding]:
    return {finding.rule: finding for finding in examine(run).findings}


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    settings = deepcopy(SETTINGS)
    for name, keys in sections.items():
        settings[name] |= keys
    return settings


def test_rules_have_names_of_their_own_and_a_sick_run_each() -> None:
    assert len(BY_ID) == len(RULES)
    assert set(BY_ID) == set(SYMPTOMS) | {"stalled"}


@pytest.mark.parametrize("rule", SYMPTOMS)
def test_a_sick_run_is_found(rule: str) -> None:
    rows = healthy_rows()
    SYMPTOMS[rule](rows)
    finding = found(record(rows, SETTINGS_OF.get(rule, SETTINGS)))[rule]
    assert finding.level in ("warn", "bad")
    assert any(character.isdigit() for character in finding.evidence), "evidence has numbers"
    assert finding.unit and finding.healthy and finding.cause and finding.remedy


@pytest.mark.parametrize("rule", SYMPTOMS)
def test_a_short_sick_run_is_not_judged(rule: str) -> None:
    rows = healthy_rows()
    SYMPTOMS[rule](rows)
    assert set(found(record(rows[-2:]))) <= FROM_ONE_STEP | FROM_TWO_EVALUATIONS


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    steps=st.sampled_from([0, 1, 5, 20, 30, 45, 80, 120, 200]),
    scatter=st.floats(0.0, 0.2),
    memory=st.sampled_from([0.0, 0.25, 0.5]),
)
def test_a_healthy_run_is_silent_whatever_its_noise(seed: int, steps: int, scatter: float, memory: float) -> None:
    assert found(record(healthy_rows(steps, seed, scatter, memory))) == {}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    steps=st.sampled_from([20, 40, 60, 120, 200]),
    scatter=st.floats(0.0, 0.2),
    memory=st.sampled_from([0.0, 0.25, 0.5]),
)
def test_a_run_that_only_scatters_has_no_other_fault_than_a_flat_reward(
    seed: int, steps: int, scatter: float, memory: float
) -> None:
    assert set(found(record(healthy_rows(steps, seed, scatter, memory, rises=False)))) <= {"reward_flat"}


def test_every_rule_is_accounted_for() -> None:
    done = examine(record(healthy_rows()))
    assert sorted([*done.healthy, *done.not_judged, *(f.rule for f in done.findings)]) == sorted(BY_ID)
    assert examine(record([])).healthy == []


def test_missing_metrics_are_not_health() -> None:
    done = examine(record([{"step": step, "time/total": 1.0} for step in range(1, 60)]))
    assert done.healthy == ["stalled"]
    assert done.not_judged["kl_ref"] == "needs policy/kl_ref"
    assert done.not_judged["reward_flat"] == "needs reward/mean"


def test_what_is_no_number_is_told_with_its_first_step_and_once() -> None:
    rows = healthy_rows(100)
    put("policy/loss", lambda at: None, share=0.5)(rows)
    finding = found(record(rows))["not_finite"]
    assert finding.level == "bad" and finding.evidence == "policy/loss in 20 of steps 81 to 100; first at step 51"
    put("run/skipped_updates", 1.0, share=0.5)(rows)
    told = found(record(rows))
    assert "not_finite" not in told and told["skipped_updates"].level == "bad"


def test_clipping_depends_on_the_loss_and_on_the_updates() -> None:
    rows = healthy_rows()
    put("policy/clip_fraction", 0.2)(rows)
    assert found(record(rows))["clipping"].level == "warn"
    assert "clipping" not in found(record(rows, changed(learn={"loss": "gspo"})))
    once = examine(record(rows, changed(learn={"updates_per_step": 1})))
    assert once.not_judged["clipping"] == "one update per batch: the ratio is 1 by construction"


def test_on_policy_a_ratio_that_is_not_one_is_a_defect() -> None:
    rows = healthy_rows()
    put("policy/ratio_mean", 1.01)(rows)
    assert "ratio" not in found(record(rows))
    assert found(record(rows, changed(learn={"updates_per_step": 1})))["ratio"].level == "bad"


def test_float32_is_held_to_more_than_bfloat16() -> None:
    rows = healthy_rows()
    assert "mismatch" not in found(record(rows))
    on_cpu = found(record(rows, changed(run={"device": "cpu"})))
    assert on_cpu["mismatch"].level == "bad"
    assert "float32" in on_cpu["mismatch"].evidence
    assert "mismatch" not in found(record(rows, changed(run={"device": "cpu"}, model={"dtype": "bfloat16"})))


def test_zero_signal_is_compared_with_what_the_success_rate_gives() -> None:
    """95 % failures in groups of 8: 0.95^8 + 0.05^8 = 66 % of groups fail as a whole."""
    rows = healthy_rows(rises=False)
    for row in rows:
        row |= {"reward/mean": 0.05, "reward/std": (0.05 * 0.95) ** 0.5, "reward/zero_std_groups": 0.7}
    hard = found(record(rows))["zero_signal"]
    assert hard.cause == "prompts are too hard for groups of 8"
    assert "66%" in hard.evidence
    for row in rows:
        row |= {"reward/mean": 0.5, "reward/std": 0.5}
    assert found(record(rows))["zero_signal"].cause == "prompts differ: some are always solved, some never"
    for row in rows:
        row |= {"reward/mean": 0.95, "reward/std": (0.05 * 0.95) ** 0.5}
    assert "zero_signal" not in found(record(rows)), "a task that is learned has little left to teach"
    for row in rows:
        row |= {"reward/mean": 0.0, "reward/std": 0.0, "reward/zero_std_groups": 1.0}
    assert "every sample has the same reward" in found(record(rows))["zero_signal"].cause


def test_entropy_that_falls_with_rising_reward_is_learning() -> None:
    rows = healthy_rows()
    SYMPTOMS["entropy_collapse"](rows)
    reward(lambda at: at)(rows)
    assert "entropy_collapse" not in found(record(rows))


def test_kl_and_length_that_rise_with_the_reward_are_learning() -> None:
    rows = healthy_rows()
    together(put("policy/kl_ref", lambda at: 0.6 * at), put("response/length_mean", lambda at: 100 + 200 * at))(rows)
    assert not {"kl_ref", "length_grows"} & set(found(record(rows)))


def test_a_task_below_its_band_is_found_once_the_run_is_half_done() -> None:
    rows = healthy_rows()
    put("policy/task/proofs/kl_ref", 0.01)(rows)
    late = found(record(rows))["task_kl"]
    assert late.level == "warn"
    assert "proofs 0.0100 nats" in late.evidence and "below its band of 0.08 to 0.15" in late.evidence
    assert "task_kl" not in found(record(rows[:50])), "every task starts at 0"
    put("policy/task/proofs/kl_ref", 0.4)(rows)
    assert found(record(rows))["task_kl"].level == "bad"
    assert examine(record(rows, changed(observe={"kl_bands": {}}))).not_judged["task_kl"] == "no observe.kl_bands"


def test_a_judge_that_is_quick_but_waited_for_is_found_too() -> None:
    rows = healthy_rows()
    put("reward/tone/wait_s", 3.0)(rows)
    waiting = found(record(rows))["slow_judge"]
    assert "of all time is spent waiting for it" in waiting.evidence and "concurrency is too low" in waiting.cause
    others = {**SETTINGS, "reward": [{"fn": "task", "timeout_s": 10.0}]}
    assert examine(record(rows, others)).not_judged["slow_judge"] == "no judge among the rewards"


def test_a_tail_is_told_from_plain_decoding_and_from_slots_that_nothing_could_fill() -> None:
    rows = healthy_rows()
    SYMPTOMS["rollout_share"](rows)
    assert found(record(rows))["rollout_share"].cause == BY_ID["rollout_share"].cause
    put("rollout/batch_occupancy", 0.2)(rows)
    assert found(record(rows))["rollout_share"].cause.startswith("each round of conversations")
    put("environment/turns_mean", 1.0)(rows)
    assert found(record(rows))["rollout_share"].cause.startswith("most of the time only a few")
    wide = changed(run={"rollout": {"max_sequences": 2048}})
    assert found(record(rows, wide))["rollout_share"].cause == BY_ID["rollout_share"].cause


def test_memory_that_nothing_would_use_is_no_fault() -> None:
    rows = healthy_rows()
    SYMPTOMS["memory_unused"](rows)
    assert "4.0 micro-batches per update" in found(record(rows))["memory_unused"].evidence
    put("run/microbatches", 2.0)(rows)
    assert "memory_unused" not in found(record(rows))
    kept = changed(run={"checkpoint_activations": True})
    assert "activations are recomputed" in found(record(rows, kept))["memory_unused"].evidence


def test_a_host_is_waited_for_only_where_it_could_be_ahead() -> None:
    """With fewer than three micro-batches an update there is nothing to launch ahead; a step here has two updates."""
    rows = healthy_rows()
    SYMPTOMS["waits_for_host"](rows)
    for microbatches, waits in ((8.0, True), (6.0, True), (5.0, False), (2.0, False)):
        put("run/microbatches", microbatches)(rows)
        assert ("waits_for_host" in found(record(rows))) == waits
    put("run/microbatches", 8.0)(rows)
    for behind, waits in ((0.0, True), (0.09, True), (0.11, False), (0.4, False)):
        put("run/device_behind", behind)(rows)
        assert ("waits_for_host" in found(record(rows))) == waits
    on_cpu = examine(record(rows, changed(run={"device": "cpu"})))
    assert on_cpu.not_judged["waits_for_host"] == on_cpu.not_judged["low_use"] == "runs on a CPU"


def test_low_use_is_told_where_nothing_else_explains_it() -> None:
    """Nor where updates are a small part of the time."""
    rows = healthy_rows()
    for use, low in ((0.01, True), (0.09, True), (0.11, False), (0.19, False)):
        put("throughput/update_mfu", use)(rows)
        assert ("low_use" in found(record(rows))) == low
    for other in ("waits_for_host", "small_microbatches"):
        rows = healthy_rows()
        together(SYMPTOMS["low_use"], SYMPTOMS[other])(rows)
        assert {"low_use", other} & set(found(record(rows))) == {other}
    rows = healthy_rows()
    together(SYMPTOMS["low_use"], share_of_time("update", 0.5))(rows)
    assert "low_use" not in found(record(rows))


def test_training_that_makes_things_worse_is_bad() -> None:
    rows = healthy_rows(rises=False)
    put("eval/pass@1", lambda at: 0.5 - 0.4 * at)(rows)
    assert found(record(rows))["eval_past_best"].level == "bad"


def test_a_run_that_stopped_writing_is_found_until_it_is_finished() -> None:
    rows = healthy_rows()[:60]
    longest = max(row["time/total"] for row in rows)
    assert "stalled" not in found(record(rows, quiet_s=10 * longest))
    stopped = found(record(rows, quiet_s=30 * longest + 60, checkpoint="step-50"))["stalled"]
    assert stopped.level == "bad"
    assert f"step 60 of {STEPS}" in stopped.evidence and "step-50" in stopped.evidence
    assert "stalled" not in found(record(rows, quiet_s=10**6, finished=True))


def test_advice_is_about_learning_and_safe_remedies_are_not() -> None:
    """What a tool may apply by itself must not touch learn, data or reward; and keys that are named exist."""
    for rule in RULES:
        named = [word.strip("(),;:") for word in rule.remedy.split()]
        keys = [
            word for word in named if word.partition(".")[0] in ("model", "data", "learn", "run", "eval", "observe")
        ]
        for key in (key for key in keys if "." in key):
            assert slot(key.split(".")), (rule.id, key)
            assert rule.kind == "advice" or key.startswith(("run.", "observe.", "eval.")), (rule.id, key)


def test_strict_makes_warnings_unhealthy() -> None:
    rows = healthy_rows()
    SYMPTOMS["packing"](rows)
    findings = examine(record(rows)).findings
    assert is_healthy(findings, strict=False) and not is_healthy(findings, strict=True)
    assert is_healthy([], strict=True)


def test_the_rules_need_no_torch() -> None:
    heavy = "{'torch', 'transformers'} & set(sys.modules)"
    code = f"import sys, trimtab.observe.doctor.examine, trimtab.observe.doctor.report; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr


def test_recoveries_are_a_count_over_the_whole_run() -> None:
    """One in step 5 is one, however many steps follow it."""
    rows = healthy_rows()
    for row in rows:
        row["run/oom_recoveries"] = float(row["step"] >= 5)
    finding = found(record(rows))["oom_recoveries"]
    assert finding.level == "warn" and finding.evidence == f"1 in 1 of {len(rows)} steps, the last in step 5"


def test_a_critic_is_judged_after_its_warm_up_and_only_where_there_is_one() -> None:
    rows = healthy_rows(60)
    put("value/explained_variance", lambda at: -0.4 if at < 0.5 else 0.2)(rows)
    warming = changed(learn={"critic": {"warmup_steps": 25}})
    assert "critic_worse" not in found(record(rows[:34], warming))
    assert "critic_worse" in found(record(rows[:30])), "without a warm-up ten steps are enough"
    for row in rows:
        row.pop("value/explained_variance")
    assert dict(examine(record(rows)).not_judged)["critic_worse"] == "there is no critic"


def test_a_critic_whose_loss_grows_with_what_it_explains_is_well() -> None:
    rows = healthy_rows()
    put("value/loss", lambda at: 0.1 + 0.5 * at)(rows)
    put("value/explained_variance", lambda at: 0.1 + 0.5 * at)(rows)
    assert "critic_diverges" not in found(record(rows))
    bound = healthy_rows()
    SYMPTOMS["critic_diverges"](bound)
    put("value/clip_fraction", 0.6)(bound)
    assert "learn.critic.clip" in found(record(bound))["critic_diverges"].remedy


def test_gradients_that_were_never_there_have_not_dropped() -> None:
    rows = healthy_rows()
    for row in rows:
        row["policy/grad_norm"] = 0.0
    assert "gradient_drop" not in found(record(rows))
