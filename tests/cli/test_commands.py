"""The commands as a user has them: train, --dry-run, --resume, eval, export, --json, and a signal in the middle."""

from __future__ import annotations

import fcntl
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny import tiny_model, tiny_tokenizer
from typer.testing import CliRunner

from trimtab import __version__
from trimtab.cli import app
from trimtab.demo import asked_steps, demo_config
from trimtab.model.load import save_model
from trimtab.observe.console import Console
from trimtab.record.sinks import read_metrics

Trimtab = Callable[..., Any]
SUMMARY = ["run_dir", "steps", "reward_first", "reward_last", "eval", "tokens_per_s", "peak_gib", "seconds"]


def test_train_leaves_the_run_folder_of_the_design(trimtab: Trimtab, here: Path) -> None:
    outcome = trimtab("train", "data.eval=rows.jsonl", "learn.steps=2", "--json")
    assert outcome.code == 0, outcome.err
    assert list(outcome.json) == SUMMARY
    assert outcome.json["run_dir"] == str(here / "runs/it")
    assert outcome.json["steps"] == 2
    there = {path.name for path in (here / "runs/it").iterdir()} - {".lock"}
    assert there == {
        "config.yaml",
        "plan.json",
        "run.json",
        "now.json",
        "events.jsonl",
        "distributions.jsonl",
        "metrics.jsonl",
        "trace.json",
        "samples",
        "eval",
        "checkpoints",
        "final",
    }
    assert "it/s" not in outcome.err, "progress bars of other libraries clutter the output"


def test_without_json_people_read_stdout(trimtab: Trimtab) -> None:
    outcome = trimtab("train")
    assert "step 1/1" in outcome.out
    assert outcome.err == ""


def test_the_resolved_config_runs_again_from_anywhere(trimtab: Trimtab, here: Path, monkeypatch) -> None:
    assert trimtab("train", f"data.train={here}/rows.jsonl").code == 0
    (here / "elsewhere").mkdir()
    monkeypatch.chdir(here / "elsewhere")
    outcome = trimtab("train", f"observe.dir={here}/again", on=str(here / "runs/it/config.yaml"))
    assert outcome.code == 0, outcome.err
    weights = [(here / run / "final/model.safetensors").read_bytes() for run in ("runs/it", "again")]
    assert weights[0] == weights[1]


def test_dry_run_checks_prints_and_makes_nothing(trimtab: Trimtab, here: Path) -> None:
    before = {path.name for path in here.iterdir()}
    outcome = trimtab("train", "--dry-run")
    assert outcome.code == 0, outcome.err
    resolved = yaml.safe_load(outcome.out.split("ok: True")[0])
    assert resolved["learn"]["advantage"] == "group_std"
    assert "sequences_per_step: 16" in outcome.out
    assert {path.name for path in here.iterdir()} == before | {"config.yaml"}
    as_json = trimtab("train", "--dry-run", "--json").json
    assert as_json["ok"] is True and as_json["longest_prompt_tokens"] == 6
    assert (as_json["first_prompt"], as_json["stop_token_ids"], as_json["warnings"]) == ("0+0=", [2], [])
    assert "plan: at most" in outcome.out and as_json["plan"]["devices"] == 1 and as_json["plan"]["peak_gib"] > 0
    assert 'prompt: "0+0="' in outcome.out and 'stops at: "<eos>" (2)' in outcome.out


def test_a_dry_run_plans_every_set_of_devices(trimtab: Trimtab) -> None:
    """What is said of gathered layers is for the set that has them in parts, not for the one device beside it."""
    placed = ["run.placement={actor: 2, rollout: 1}", "run.shard=full", "run.prefetch=2"]
    outcome = trimtab("train", "--dry-run", "--json", *placed)
    assert outcome.code == 0, outcome.err
    assert outcome.json["plan"]["devices"] == 3


@pytest.mark.parametrize(
    ("devices", "parts", "words"),
    [
        (6, 4, "6 devices cannot be divided into engines of 4. Write 3, or run.devices: 8"),
        (8, 8, "feed-forward columns evenly over 8 devices. Write 4."),
    ],
)
def test_engines_that_cannot_divide_devices_are_refused_alike(
    trimtab: Trimtab, here: Path, monkeypatch: pytest.MonkeyPatch, devices: int, parts: int, words: str
) -> None:
    monkeypatch.setattr("trimtab.run.machine.physical_cores", lambda: 8)
    python = here / "with-vllm"
    python.write_text("""#!/bin/sh\necho '{"there": true, "version": "0.32.0"}'\n""")
    python.chmod(0o755)
    given = [f"run.devices={devices}", f"run.rollout.tensor_parallel={parts}", f"run.rollout.python={python}"]
    for command in (["plan"], ["train", "--dry-run"], ["train"]):
        outcome = trimtab(*command, *given)
        assert outcome.code != 0 and words in " ".join(outcome.err.split()), command
        assert "run.rollout.tensor_parallel" in outcome.err


@pytest.mark.parametrize("command", ["train", "sft"])
def test_a_turn_that_ends_with_what_does_not_stop_is_told(
    trimtab: Trimtab, here: Path, config: dict[str, Any], command: str
) -> None:
    """In the run and before it; and no more once the token is declared."""
    model = tiny_model("llama")
    tokenizer = tiny_tokenizer("{% for m in messages %}{{ m.role }}:{{ m.content }}<bos>{% endfor %}assistant:")
    tokenizer.bos_token = None
    save_model(model, tokenizer, here / "chat")
    config["model"] = {"path": "chat"}
    if command == "sft":
        del config["reward"], config["run"]["reward_workers"]
        config |= {"stage": "sft", "learn": {"steps": 1, "sequences_per_step": 4}}
        config["data"] = {"train": "rows.jsonl", "completion": "answer"}
    told = 'the chat template ends an answer with "<bos>" (1), which is not among the stop tokens ("<eos>" (2))'
    looked = trimtab(command, "--dry-run", "--json")
    assert told in looked.json["warnings"][0]
    assert f"warning: {told}" in trimtab(command, "--dry-run").out
    run = trimtab(command)
    assert run.code == 0, run.err
    assert f"warning: {told}" in run.out and "assistant:" in run.out and "stops at" in run.out
    (here / "chat" / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert trimtab(command, "--dry-run", "--json", "observe.dir=other").json["warnings"] == []


def test_some_prompts_too_long_are_left_out_and_told(trimtab: Trimtab, here: Path) -> None:
    """Also when they are so many that the longest texts alone have no usable prompt among them."""
    rows = [{"prompt": "1" * 300}] * 100 + [{"prompt": "1+1="}, {"prompt": "2+2="}]
    (here / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    told = "data.train: 100 of 102 prompts are longer than 250 tokens and are left out"
    assert told in trimtab("train", "data.train=long.jsonl", "--dry-run").out
    outcome = trimtab("train", "data.train=long.jsonl", "data.eval=long.jsonl")
    assert outcome.code == 0, outcome.err
    assert told in outcome.out
    assert "data.eval: 2 prompts, the longest of the set 300 tokens; 100 left out" in outcome.out
    samples = (here / "runs/it/samples/step-1.jsonl").read_text().splitlines()
    assert {json.loads(line)["prompt"] for line in samples} == {"1+1=", "2+2="}


def test_resume_goes_on_and_starts_where_there_is_nothing(trimtab: Trimtab, here: Path) -> None:
    assert trimtab("train", "--resume", "learn.steps=1").code == 0
    outcome = trimtab("train", "--resume", "learn.steps=2", "learn.lr=0.002", "run.token_budget=500")
    assert outcome.code == 0, outcome.err
    shown = " ".join(outcome.out.split())
    assert (
        "warning: settings changed since step-1; the run continues with the new ones: learn.lr 0.002 (was 0.001)"
        in shown
    )
    assert [row["step"] for row in read_metrics(here / "runs/it")] == [1, 2]


def test_resume_of_a_run_that_was_killed_before_its_first_checkpoint(trimtab: Trimtab, here: Path, monkeypatch) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("trimtab.run.rollout_step.sample", interrupt)
        assert trimtab("train").code == 130
    assert not (here / "runs/it/checkpoints").exists()
    assert trimtab("train", "--resume", "learn.lr=0.5").code == 0, "from the beginning, so nothing has changed"
    assert [row["step"] for row in read_metrics(here / "runs/it")] == [1]


def test_a_folder_in_use_is_refused_and_left_alone(trimtab: Trimtab, here: Path) -> None:
    assert trimtab("train").code == 0
    with (here / "runs/it/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        outcome = trimtab("train", "--resume", "learn.steps=5")
    assert outcome.code == 2
    assert "observe.dir: another process is running in" in outcome.err
    assert yaml.safe_load((here / "runs/it/config.yaml").read_text())["learn"]["steps"] == 1


@pytest.mark.parametrize(
    ("signum", "name", "status"),
    [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143), (signal.SIGHUP, "SIGHUP", 129)],
)
def test_a_signal_ends_cleanly_with_all_that_was_learned(
    trimtab: Trimtab, here: Path, monkeypatch, signum: int, name: str, status: int
) -> None:
    original = Console.step

    def then_signal(self: Console, step: int, metrics: Any) -> None:
        original(self, step, metrics)
        if step == 2:
            os.kill(os.getpid(), signum)

    handler = signal.getsignal(signal.SIGTERM)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and what nohup started the other
    with monkeypatch.context() as patched:
        patched.setattr(Console, "step", then_signal)
        outcome = trimtab("train", "learn.steps=3", "--json")
    signal.signal(signal.SIGINT, interrupt)
    assert signal.signal(signal.SIGHUP, hangup) == signal.SIG_DFL
    assert outcome.code == status
    assert outcome.exception is None
    assert outcome.json["error"] == f"stopped by {name}"
    shown = " ".join(outcome.err.split())
    assert "stopped after step 2 of 3; resume it to continue from step-2" in shown
    assert shown.endswith(f"stopped by {name}")
    assert signal.getsignal(signal.SIGTERM) == handler
    assert trimtab("train", "learn.steps=3", "--resume").code == 0
    assert [row["step"] for row in read_metrics(here / "runs/it")] == [1, 2, 3]


def test_a_run_that_nohup_started_outlives_its_terminal(trimtab: Trimtab, here: Path, monkeypatch) -> None:
    original = Console.step

    def then_hang_up(self: Console, step: int, metrics: Any) -> None:
        original(self, step, metrics)
        os.kill(os.getpid(), signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr(Console, "step", then_hang_up)
    outcome = trimtab("train", "learn.steps=1")
    assert signal.signal(signal.SIGHUP, before) == signal.SIG_IGN
    assert outcome.code == 0


def test_the_best_checkpoint_is_kept_whenever_it_comes(trimtab: Trimtab, here: Path, monkeypatch) -> None:
    """Evaluations and checkpoints have their own rhythms; `best` must exist all the same."""
    accuracies = iter([0.1, 0.5, 0.3, 0.2])
    monkeypatch.setattr("trimtab.run.loop.measure", lambda *_: ({"eval/pass@1": next(accuracies)}, []))
    arguments = ["data.eval=rows.jsonl", "learn.steps=3", "observe.eval_every=1", "observe.checkpoint_every=0"]
    outcome = trimtab("train", *arguments, "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["eval"] == {"before": 0.1, "after": 0.2}
    assert {path.name for path in (here / "runs/it/checkpoints").iterdir()} == {"step-1", "step-3"}
    exported = trimtab("export", "best-model", "--checkpoint", "best", "--json", on="runs/it")
    assert exported.json == {"checkpoint": "runs/it/checkpoints/step-1", "folder": "best-model"}


def test_eval_measures_and_leaves_nothing(trimtab: Trimtab, here: Path) -> None:
    before = {path.name for path in here.iterdir()} | {"config.yaml"}
    outcome = trimtab("eval", "data.eval=rows.jsonl", "eval.limit=5", "eval.threshold=0.0", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["eval/pass@1"] == 1.0
    assert outcome.json["eval/prompts"] == 5.0
    assert {path.name for path in here.iterdir()} == before


def test_export(trimtab: Trimtab, here: Path) -> None:
    assert trimtab("train").code == 0
    outcome = trimtab("export", "out", "--dtype", "bfloat16", on="runs/it")
    assert outcome.code == 0, outcome.err
    assert outcome.out == "step-1 of runs/it -> out\n"
    again = trimtab("export", "out", "--json", on="runs/it")
    assert again.code == 2
    assert "FOLDER: out already exists" in again.json["error"]


def test_version_and_help_have_the_usual_names() -> None:
    told = CliRunner().invoke(app, ["--version"])
    assert told.exit_code == 0 and told.stdout == f"trimtab {__version__}\n"
    assert CliRunner().invoke(app, ["train", "-h"]).exit_code == 0


def test_python_dash_m(here: Path) -> None:
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-m", "trimtab", "--help"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for command in ("train", "eval", "export", "demo"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [([], 150), (["learn.lr=1"], 150), (["learn.steps=2"], 2), (["learn.steps=many"], 150), (["learn.steps=²"], 150)],
)
def test_the_demo_warms_up_within_the_steps_that_are_asked_for(
    tmp_path: Path, overrides: list[str], steps: int
) -> None:
    asked = asked_steps(overrides, 150)
    assert asked == steps and demo_config(tmp_path, 8, asked, 0)["learn"]["schedule"]["warmup_steps"] < steps


@pytest.mark.parametrize(
    "arguments", [["--warm-steps=-1"], ["--warm-steps=0"], ["--difficulty=-1"], ["--difficulty=29"]]
)
def test_numbers_that_the_demo_cannot_have_are_told(here: Path, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    name, _, value = arguments[0].partition("=")
    assert result.exit_code == 2 and f"{name}: {value} is " in result.stderr and "Write 1" in result.stderr
    assert json.loads(result.stdout)["kind"] == "ConfigError" and not (here / "runs").exists()
