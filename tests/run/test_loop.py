"""The loop: what a run leaves behind, and how it meets trouble."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import trimtab
from tests import running
from tests.quick_rewards import constant, one_flat_group_and_one_failure
from tests.running import letters
from trimtab.base.errors import ConfigError, RewardError, TrainingError
from trimtab.config.load import load_any
from trimtab.observe.doctor.examine import examine
from trimtab.observe.doctor.record import read_record
from trimtab.observe.meters import MemoryMeter
from trimtab.plan.governor import Governor, Move
from trimtab.record.checkpoint import checkpoints
from trimtab.record.sinks import read_metrics
from trimtab.run import rollout_step
from trimtab.run.export import export_run
from trimtab.update.updater import Updater

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(5)]


def train(model_folder: Path | dict[str, Any], tmp_path: Path, **changes: Any) -> tuple[Path, list[dict[str, Any]]]:
    usual = {
        "data": ROWS[:20],
        "eval_data": ROWS[20:],
        "reward": letters,
        "learn": {"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8, "lr": 1e-3},
        "observe": {"samples_every": 1, "tensorboard": True},
    }
    run = running.train(model_folder, tmp_path / "run", usual, changes)
    return run.folder, run.metrics


STABLE_NAMES = [
    *(f"reward/{n}" for n in ("mean", "std", "zero_std_groups", "failed", "letters")),
    *(f"response/{n}" for n in ("length_mean", "truncated")),
    *(f"policy/{n}" for n in ("loss", "entropy", "kl_old", "ratio_mean", "clip_fraction", "grad_norm")),
    *(f"rollout/{n}" for n in ("logprob_gap", "tokens_per_s", "batch_occupancy", "kv_usage")),
    *(f"time/{n}" for n in ("rollout", "reward", "score", "update", "publish", "checkpoint", "idle", "total")),
    "throughput/tokens_per_s",
    "memory/host_gib",
    "memory/host_left_gib",
    "run/oom_recoveries",
    *(f"run/{n}" for n in ("token_budget", "max_microbatch_tokens", "microbatches", "packing_fill")),
]


def test_a_run_folder_holds_what_the_design_says(model_folder, tmp_path) -> None:
    folder, metrics = train(model_folder, tmp_path)
    for name in ("config.yaml", "plan.json", "metrics.jsonl", "trace.json", "samples", "checkpoints/step-3", "final"):
        assert (folder / name).exists(), name
    assert [row["step"] for row in metrics] == [0, 1, 2, 3]
    assert "eval/pass@1" in metrics[0]
    assert "eval/pass@1" in metrics[3]
    for name in STABLE_NAMES:
        assert isinstance(metrics[1][name], float | int), name
    assert metrics[1]["policy/ratio_mean"] == 1.0
    assert metrics[1]["rollout/logprob_gap"] < 1e-5
    assert metrics[1]["run/max_microbatch_tokens"] <= metrics[1]["run/token_budget"]
    phases = sum(
        metrics[2][f"time/{n}"]
        for n in ("rollout", "reward", "score", "update", "publish", "checkpoint", "eval", "idle")
    )
    assert phases == pytest.approx(metrics[2]["time/total"])
    choices = {choice["key"] for choice in json.loads((folder / "plan.json").read_text())["choices"]}
    assert "run.token_budget" in choices
    assert len((folder / "samples" / "step-2.jsonl").read_text().splitlines()) == 16


def test_the_weights_move_and_the_reward_is_learned(model_folder, tmp_path) -> None:
    """Thirty steps on a reward that any policy can raise: more letters from the beginning of the alphabet."""
    folder, metrics = train(model_folder, tmp_path, learn={"steps": 30, "lr": 3e-3, "prompts_per_step": 8})
    before, after = (load_file(f / "model.safetensors") for f in (model_folder, folder / "final"))
    assert any(not torch.equal(before[k], after[k]) for k in before)
    rewards = [row["reward/mean"] for row in metrics[1:]]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3


def adapted(model_folder: Path, **lora: Any) -> dict[str, Any]:
    return {"path": str(model_folder), "lora": {"r": 4, **lora}}


def test_adapters_learn_and_the_final_model_has_them_merged_in(model_folder, tmp_path) -> None:
    learn = {"steps": 30, "lr": 1e-2, "prompts_per_step": 8, "kl": {"coef": 1e-3}}
    folder, metrics = train(adapted(model_folder), tmp_path, learn=learn)
    rewards = [row["reward/mean"] for row in metrics[1:]]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.3
    assert metrics[1]["policy/kl_ref"] == pytest.approx(0.0, abs=1e-6)  # the reference is the model without them
    assert metrics[30]["policy/kl_ref"] > 1e-3
    assert metrics[30]["rollout/logprob_gap"] < 1e-5
    assert (folder / "final/adapter/adapter_model.safetensors").is_file()
    before, after = (load_file(f / "model.safetensors") for f in (model_folder, folder / "final"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all("proj" in name for name in changed)
    exported = export_run(folder, tmp_path / "out", "last", "same")
    assert exported.name == "step-30"
    again = load_file(tmp_path / "out/model.safetensors")
    assert all(torch.equal(again[name], after[name]) for name in after)


def test_adapters_resume_exactly_and_only_with_their_own_rank(model_folder, tmp_path) -> None:
    observe = {"checkpoint_every": 2}
    whole, _ = train(adapted(model_folder), tmp_path / "whole", learn={"steps": 4}, observe=observe)
    half, _ = train(adapted(model_folder), tmp_path / "half", learn={"steps": 2}, observe=observe)
    assert not (half / "checkpoints/step-2/model.safetensors").exists()  # the frozen weights are where they came from
    others = [adapted(model_folder, r=8), adapted(model_folder, targets=["q_proj"]), {"path": str(model_folder)}]
    for other in others:
        with pytest.raises(ConfigError, match=r"model\.lora: step-2 cannot continue with other adapters: model\.lora"):
            train(other, tmp_path / "half", learn={"steps": 4}, observe=observe, resume=True)
    train(adapted(model_folder), tmp_path / "half", learn={"steps": 4}, observe=observe, resume=True)
    one, two = (load_file(f / "final/model.safetensors") for f in (whole, half))
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_what_lives_as_long_as_a_run_is_not_collected_again_and_again(model_folder, tmp_path) -> None:
    frozen, update = [], Updater.accumulate

    def watched(self, *arguments):
        frozen.append(gc.get_freeze_count())
        return update(self, *arguments)

    gc.unfreeze()  # as conftest.py leaves it for all tests
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Updater, "accumulate", watched)
            train(model_folder, tmp_path, learn={"steps": 1})
        assert frozen[0] > 10_000
        assert gc.get_freeze_count() == 0
    finally:
        gc.freeze()


def test_several_updates_a_batch_move_the_ratio(model_folder, tmp_path) -> None:
    for source in ("trainer", "engine"):
        learn = {"updates_per_step": 2, "epochs_per_step": 2, "old_logprobs": source}
        _, metrics = train(model_folder, tmp_path / source, learn=learn)
        assert metrics[1]["policy/kl_old"] > 0
        assert metrics[1]["run/microbatches"] >= 4


def test_a_governed_step_runs_with_what_the_one_before_led_to(model_folder, tmp_path, monkeypatch) -> None:
    """The governor knows how many updates a step has, and what it moves is moved."""
    seen: list[tuple[int, Move]] = []

    def more(self: Governor, metrics: dict[str, float], now: Move, ceiling: int | None) -> Move:
        seen.append((self.updates, now))
        return Move(now.budget + 128, True)

    monkeypatch.setattr(Governor, "next_move", more)
    learn = {"updates_per_step": 2, "epochs_per_step": 2, "loss": "clip", "steps": 3}
    _, metrics = train(model_folder, tmp_path, learn=learn)
    first = seen[0][1]
    assert seen == [(4, first), (4, Move(first.budget + 128, True)), (4, Move(first.budget + 256, True))]
    assert [row["run/token_budget"] - first.budget for row in metrics if "run/token_budget" in row] == [0, 128, 256]


def test_kl_is_zero_at_first_and_the_adaptive_controller_moves(model_folder, tmp_path) -> None:
    learn = {"kl": {"coef": 0.1, "target": 1e-4, "horizon": 16}, "lr": 1e-2}
    _, metrics = train(model_folder, tmp_path, learn=learn)
    assert metrics[1]["policy/kl_ref"] == pytest.approx(0.0, abs=1e-6)
    assert metrics[3]["policy/kl_ref"] > 1e-4
    assert metrics[1]["policy/kl_coef"] == 0.1  # what the step was done with
    assert metrics[2]["policy/kl_coef"] == pytest.approx(0.08)  # far below the target: lowered by the most allowed
    assert metrics[3]["policy/kl_coef"] == pytest.approx(0.096)  # far above it: raised by the most allowed


def test_memory_is_measured_phase_by_phase(model_folder, tmp_path, monkeypatch) -> None:
    phase, opened = MemoryMeter.phase, []
    monkeypatch.setattr(MemoryMeter, "phase", lambda self, name: (opened.append(name), phase(self, name))[1])
    train(model_folder, tmp_path, learn={"steps": 1})
    assert [name for name in opened if name != "rollout"] == ["score", "update", "optimizer"]


def test_a_kl_that_is_no_number_moves_nothing(model_folder, tmp_path, monkeypatch) -> None:
    original = Updater.accumulate
    calls = {"count": 0}

    def poisoned(self, samples, kl_coef):
        calls["count"] += 1
        if calls["count"] == 2:
            for sample in samples:
                sample.ref_logprobs = torch.full_like(sample.ref_logprobs, float("nan"))
        return original(self, samples, kl_coef)

    monkeypatch.setattr(Updater, "accumulate", poisoned)
    _, metrics = train(model_folder, tmp_path, learn={"kl": {"coef": 0.1, "target": 1e-4, "horizon": 16}})
    assert metrics[1]["policy/kl_coef"] != metrics[2]["policy/kl_coef"] == metrics[3]["policy/kl_coef"]


@pytest.mark.parametrize(("before", "after"), [(0.01, 0.5), (0.0, 0.5), (0.01, 0.01)])
def test_a_resumed_run_goes_on_with_the_kl_that_is_asked_for(
    model_folder, tmp_path, before: float, after: float
) -> None:
    """And with the controller's own where nothing else is asked for."""
    kl = {"target": 1e-4, "horizon": 16}
    _, first = train(
        model_folder, tmp_path, learn={"steps": 2, "kl": {"coef": before, **(kl if before == after else {})}}
    )
    learn = {"steps": 3, "kl": {"coef": after, **(kl if before == after else {})}}
    _, metrics = train(model_folder, tmp_path, learn=learn, resume=True)
    if before == after:
        # 16 samples, a horizon of 16: each step makes a whole correction, by the error it saw and at most a fifth.
        assert first[2]["policy/kl_coef"] == pytest.approx(0.8 * before)
        error = min(max(first[2]["policy/kl_ref"] / 1e-4 - 1, -0.2), 0.2)
        assert abs(error) > 0.05, "the coefficient must move to show that it was kept"
        assert metrics[3]["policy/kl_coef"] == pytest.approx((1 + error) * 0.8 * before)
    else:
        assert metrics[3]["policy/kl_coef"] == after


def test_a_coefficient_that_is_no_longer_steered_is_the_one_that_is_written(model_folder, tmp_path) -> None:
    train(model_folder, tmp_path, learn={"steps": 2, "kl": {"coef": 0.1, "target": 1e-4, "horizon": 16}})
    _, metrics = train(model_folder, tmp_path, learn={"steps": 3, "kl": {"coef": 0.1}}, resume=True)
    assert metrics[2]["policy/kl_coef"] < metrics[3]["policy/kl_coef"] == 0.1


def test_a_resume_that_died_before_its_first_checkpoint_is_not_what_the_run_learned_with(
    model_folder, tmp_path, monkeypatch, capsys
) -> None:
    train(model_folder, tmp_path, learn={"steps": 1, "kl": {"coef": 0.01}})
    changed = {"steps": 2, "kl": {"coef": 0.5}, "lr": 2e-3}
    with monkeypatch.context() as dying:
        dying.setattr(Updater, "accumulate", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(model_folder, tmp_path, learn=changed, resume=True)
    capsys.readouterr()
    _, metrics = train(model_folder, tmp_path, learn=changed, resume=True)
    told = " ".join(capsys.readouterr().out.split())
    assert "learn.lr 0.002 (was 0.001)" in told and "learn.kl.coef 0.5 (was 0.01)" in told
    assert metrics[2]["policy/kl_coef"] == 0.5


@pytest.mark.parametrize("pinned", [{"offload": {"activations": True}}, {"checkpoint_activations": True}])
def test_a_run_resumes_from_what_its_plan_has_written(model_folder, tmp_path, pinned: dict[str, Any]) -> None:
    folder, _ = train(model_folder, tmp_path, learn={"steps": 1}, run=pinned)
    assert load_any(folder / "config.yaml").run.checkpoint_activations is True
    _, metrics = train(model_folder, tmp_path, learn={"steps": 2}, run=pinned, resume=True)
    assert metrics[-1]["step"] == 2


def test_a_run_killed_in_its_very_last_moments_is_tidied_by_the_resume_that_has_nothing_to_train(
    model_folder, tmp_path
) -> None:
    """As a kill leaves it between saving the last checkpoint and removing the one before it, and while exporting."""
    folder, _ = train(model_folder, tmp_path, observe={"checkpoint_every": 1, "keep_checkpoints": 2})
    final = (folder / "final" / "model.safetensors").read_bytes()
    (folder / "final").rename(folder / ".deleting-final")
    for name in (".writing-final", "checkpoints/.deleting-step-1", "checkpoints/.writing-step-3"):
        (folder / name).mkdir()
        (folder / name / "stale.txt").write_text("half")
    train(model_folder, tmp_path, observe={"checkpoint_every": 1, "keep_checkpoints": 1}, resume=True)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-3"]
    assert not [*folder.glob(".writing*"), *folder.glob(".deleting*"), *(folder / "final").glob("stale*")]
    assert (folder / "final" / "model.safetensors").read_bytes() == final


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce", "reinforce_pp"])
def test_groups_without_signal_are_counted_only_where_samples_are_compared_within_them(
    model_folder, tmp_path, algorithm: str
) -> None:
    """One sample a prompt is compared with the step's others, or with a critic: there is signal in every one."""
    learn = {"steps": 5, "algorithm": algorithm, "samples_per_prompt": 1, "prompts_per_step": 8}
    folder, metrics = train(model_folder, tmp_path, learn=learn)
    assert all(row["reward/std"] > 0 and row["policy/grad_norm"] > 0 for row in metrics[1:])
    assert not any("reward/zero_std_groups" in row for row in metrics)
    examined = examine(read_record(folder))
    assert "zero_signal" not in {finding.rule for finding in examined.findings}
    assert dict(examined.not_judged)["zero_signal"] == "samples are not compared within their groups"


def test_nothing_is_learned_where_all_that_could_be_is_masked(model_folder, tmp_path, capsys) -> None:
    """No weight decays, either."""
    learn = {"steps": 2, "max_new_tokens": 1, "mask_truncated": True, "optimizer": {"weight_decay": 0.1}}
    folder, metrics = train(model_folder, tmp_path, learn=learn)
    assert [row["run/samples_trained"] for row in metrics[1:]] == [0, 0]
    assert [row["run/dropped_truncated"] for row in metrics[1:]] == [16, 16]
    before, after = (load_file(f / "model.safetensors") for f in (model_folder, folder / "final"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (
        "step 1: every completion is truncated, and learn.mask_truncated drops those; the step learns nothing"
        in " ".join(capsys.readouterr().out.split())
    )


@pytest.mark.curve
def test_a_run_ends_with_its_curve_and_with_what_the_doctor_finds(model_folder, tmp_path, capsys) -> None:
    folder, _ = train(model_folder, tmp_path, reward=constant, learn={"steps": 6, "max_new_tokens": 2})
    shown = " ".join(capsys.readouterr().out.split())
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "warning: no group had signal in the last 3 steps" in shown
    told = shown.partition("The doctor finds: ")[2]
    assert "groups without signal" in told and told.endswith(f"Run `trimtab doctor {folder}`")


@pytest.mark.curve
@pytest.mark.parametrize("wanted", [True, False])
def test_a_run_ends_with_its_report_unless_that_is_off(wanted: bool, model_folder, tmp_path, capsys) -> None:
    folder, _ = train(model_folder, tmp_path, learn={"steps": 1, "max_new_tokens": 2}, observe={"report": wanted})
    assert (folder / "report.html").exists() is wanted
    assert (f"report: {folder / 'report.html'}" in " ".join(capsys.readouterr().out.split())) is wanted


@pytest.mark.curve
def test_no_report_can_fail_a_run(model_folder, tmp_path, capsys, monkeypatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trimtab.observe.look_back.write_report", fail)
    folder, _ = train(model_folder, tmp_path, learn={"steps": 1, "max_new_tokens": 2})
    assert (folder / "final").exists() and not (folder / "report.html").exists()
    assert "warning: cannot write the report: [Errno 28] No space left" in " ".join(capsys.readouterr().out.split())


@pytest.mark.curve
def test_no_picture_can_fail_a_run(model_folder, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    folder, _ = train(model_folder, tmp_path, learn={"steps": 1, "max_new_tokens": 2})
    assert (folder / "final").exists() and not (folder / "curve.png").exists()
    shown = " ".join(capsys.readouterr().out.split())
    assert "cannot draw curve.png: drawing a learning curve needs matplotlib" in shown and "trimtab[plot]" in shown
    assert "The doctor finds" not in shown


def test_failures_are_a_share_of_the_step_and_not_of_a_refill(model_folder, tmp_path) -> None:
    """One of the four samples that replace a group fails: one of the step's twenty, which is allowed."""
    learn = {"steps": 1, "algorithm": "dapo"}
    data = {"train": ROWS[:5], "shuffle": False}
    summary = trimtab.train(
        model=str(model_folder), data=data, reward=one_flat_group_and_one_failure,
        learn={"prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8, **learn},
        observe={"dir": str(tmp_path / "run"), "tensorboard": False},
    )  # fmt: skip
    (row,) = [row for row in read_metrics(Path(summary["run_dir"])) if row["step"] == 1]
    assert (row["rollout/refills"], row["run/samples"], row["reward/failed"]) == (1, 20, 1)
    assert row["run/samples_trained"] + row["run/dropped_no_signal"] + row["run/dropped_reward_failed"] == 20
    assert row["rollout/tokens"] == pytest.approx(20 * row["response/length_mean"]), "of both calls"


def test_calls_that_were_repeated_sample_by_sample_are_counted(model_folder, tmp_path) -> None:
    def one_at_a_time(completions: list[str]) -> list[float]:
        (only,) = completions
        return [float(len(only))]

    summary = trimtab.train(
        model=str(model_folder), data=ROWS, reward=one_at_a_time,
        learn={"steps": 1, "prompts_per_step": 3, "samples_per_prompt": 2, "max_new_tokens": 4},
        observe={"dir": str(tmp_path / "run"), "tensorboard": False},
    )  # fmt: skip
    row = read_metrics(Path(summary["run_dir"]))[-1]
    assert (row["reward/repeated"], row["reward/failed"]) == (3, 0)


def test_a_non_finite_step_changes_nothing_and_is_counted(model_folder, tmp_path, monkeypatch) -> None:
    original = Updater.accumulate
    calls = {"count": 0}

    def poisoned(self, samples, kl_coef):
        calls["count"] += 1
        if calls["count"] == 2:
            samples[0].advantages = torch.full_like(samples[0].advantages, float("nan"))
        return original(self, samples, kl_coef)

    monkeypatch.setattr(Updater, "accumulate", poisoned)
    _, metrics = train(model_folder, tmp_path)
    assert [row["run/skipped_updates"] for row in metrics[1:]] == [0, 1, 0]


def test_too_many_non_finite_steps_stop_the_run(model_folder, tmp_path, monkeypatch) -> None:
    original = Updater.accumulate

    def poisoned(self, samples, kl_coef):
        samples[0].advantages = torch.full_like(samples[0].advantages, float("inf"))
        return original(self, samples, kl_coef)

    monkeypatch.setattr(Updater, "accumulate", poisoned)
    with pytest.raises(TrainingError, match="5 updates in a row"):
        train(model_folder, tmp_path, learn={"steps": 9})


def test_the_same_seed_gives_the_same_run_and_another_seed_another(model_folder, tmp_path) -> None:
    runs = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        folder, _ = train(model_folder, tmp_path / name, learn={"seed": seed})
        runs[name] = load_file(folder / "final" / "model.safetensors")
    assert all(torch.equal(runs["a"][k], runs["b"][k]) for k in runs["a"])
    assert any(not torch.equal(runs["a"][k], runs["c"][k]) for k in runs["a"])


def test_the_best_checkpoint_by_evaluation_is_kept(model_folder, tmp_path) -> None:
    folder, metrics = train(
        model_folder,
        tmp_path,
        learn={"steps": 6},
        eval={"threshold": 2.0},
        observe={"eval_every": 1, "checkpoint_every": 1, "keep_checkpoints": 1},
    )
    scores = {row["step"]: row["eval/pass@1"] for row in metrics if row["step"]}
    best = max(scores, key=lambda step: (scores[step], -step))
    kept = {int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir()}
    assert kept == {best, 6}


def test_the_order_in_which_groups_finish_does_not_matter(model_folder, tmp_path, monkeypatch) -> None:
    """With two updates a batch, which prompts the first one gets must not depend on which completions were done first."""
    from trimtab.rollout.native.engine import NativeEngine

    weights = {}
    original = NativeEngine.generate
    for name, reverse in (("as finished", False), ("reversed", True)):

        def generate(self, requests, reverse=reverse):
            groups = list(original(self, requests))
            return iter(groups[::-1] if reverse else groups)

        monkeypatch.setattr(NativeEngine, "generate", generate)
        folder, _ = train(model_folder, tmp_path / name, learn={"updates_per_step": 2})
        weights[name] = load_file(folder / "final" / "model.safetensors")
    assert all(torch.equal(weights["as finished"][k], weights["reversed"][k]) for k in weights["reversed"])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RewardError])
def test_a_rollout_that_is_stopped_loses_no_step(model_folder, tmp_path, monkeypatch, error) -> None:
    """No checkpoint is due before the last step; the run that was stopped in its third ends as the one that was not."""
    whole, _ = train(model_folder, tmp_path / "whole")
    sample = rollout_step.sample

    def stopped(run: Any, *rest: Any) -> Any:
        if run.state.step == 2:
            raise error("stop")
        return sample(run, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(rollout_step, "sample", stopped)
        with pytest.raises(error):
            train(model_folder, tmp_path / "stopped")
    assert list(checkpoints(tmp_path / "stopped" / "run")) == [2]
    resumed, rows = train(model_folder, tmp_path / "stopped", resume=True)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    ours, theirs = (load_file(folder / "final" / "model.safetensors") for folder in (resumed, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
