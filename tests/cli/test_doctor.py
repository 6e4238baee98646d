"""`trimtab doctor` as a user and a CI job have it: exit status, --json, --strict, and folders that are no run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.observe.symptoms import SETTINGS, SYMPTOMS, healthy_rows
from trimtab.cli import app
from trimtab.observe.doctor.machine import look_at_machine
from trimtab.observe.doctor.report import print_report, rules_table, run_report
from trimtab.observe.doctor.rules import RULES

Trimtab = Callable[..., Any]
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., str]:
    def make(rule: str | None = None, steps: int | None = None, finished: bool = True) -> str:
        rows = healthy_rows()
        if rule:
            SYMPTOMS[rule](rows)
        folder = tmp_path / (rule or "healthy")
        (folder / "final" if finished else folder).mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(SETTINGS))
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:steps]))
        return str(folder)

    return make


def doctor(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.mark.parametrize(
    ("rule", "strict", "status"),
    [(None, False, 0), (None, True, 0), ("packing", False, 0), ("packing", True, 1), ("zero_signal", False, 1)],
)
def test_the_exit_status_tells(make_run: Callable[..., str], rule: str | None, strict: bool, status: int) -> None:
    result = doctor(make_run(rule), "--json", *["--strict"] * strict)
    assert result.exit_code == status, result.stderr
    (line,) = result.stdout.splitlines()
    told = json.loads(line)
    assert told["healthy"] is (status == 0)
    assert (rule in [finding["rule"] for finding in told["findings"]]) == bool(rule)
    assert all(finding["kind"] in ("safe", "advice") for finding in told["findings"])
    accounted = [*told["rules_healthy"], *told["rules_not_judged"], *(finding["rule"] for finding in told["findings"])]
    assert sorted(accounted) == sorted(rule.id for rule in RULES)


def test_people_read_evidence_and_remedy(make_run: Callable[..., str]) -> None:
    result = doctor(make_run("zero_signal"))
    assert result.stderr == ""
    shown = " ".join(result.stdout.split())
    assert "BAD groups without signal zero_signal seen 95% of groups over steps 101 to 120" in shown
    assert "advice: it changes what is learned" in shown
    assert "1 bad, 1 warning" in shown


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_a_run_of_few_steps_is_said_to_be_one(make_run: Callable[..., str], steps: int) -> None:
    result = doctor(make_run("zero_signal", steps=steps, finished=bool(steps)))
    assert result.exit_code == 0
    assert f"Too few steps to judge: {steps} step" in result.stdout
    assert "nothing found" in result.stdout


def test_what_is_no_run_is_an_error_of_use(tmp_path: Path) -> None:
    result = doctor(str(tmp_path))
    assert result.exit_code == 2
    assert "it has no config.yaml" in result.stderr
    as_json = doctor(str(tmp_path / "gone"), "--json")
    assert as_json.exit_code == 2
    assert "does not exist" in json.loads(as_json.stdout)["error"]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: file.unlink(), "is missing, but the run has trained: it is finished"),
        (lambda file: file.write_text(""), "is empty, but the run has trained"),
        (lambda file: file.write_bytes(bytes(range(128, 256))), "holds no step that can be read"),
        (lambda file: file.write_text('{"x": 1}\n'), "holds no step that can be read"),
        (lambda file: (file.unlink(), file.mkdir()), "cannot be read: Is a directory"),
    ],
)
def test_a_run_without_its_metrics_is_not_called_healthy(
    make_run: Callable[..., str], damage: Callable[[Path], object], message: str, strict: bool
) -> None:
    folder = make_run()
    damage(Path(folder) / "metrics.jsonl")
    result = doctor(folder, "--json", *["--strict"] * strict)
    assert result.exit_code == 2
    assert message in json.loads(result.stdout)["error"]


def test_a_checkpoint_is_no_run(make_run: Callable[..., str]) -> None:
    run = Path(make_run())
    checkpoint = run / "checkpoints" / "step-3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.yaml").write_text("{}")
    result = doctor(str(checkpoint))
    assert result.exit_code == 2
    assert f"step-3 is a checkpoint, not a run. Give the run's folder: trimtab doctor {run}" in result.stderr
    assert f"Did you mean {run}?" in doctor(str(run / "checkpoints")).stderr


def test_a_broken_config_is_told_with_its_line(make_run: Callable[..., str]) -> None:
    run = Path(make_run())
    (run / "config.yaml").write_text("learn:\n  steps: [1\nmodel: }\n")
    result = doctor(str(run))
    assert result.exit_code == 2
    assert f"{run}/config.yaml, line 3, column 6: YAML cannot be read: " in result.stderr


@pytest.mark.parametrize(("stage", "loss"), [("sft", "sft/loss"), ("reward-model", "rm/loss")])
def test_what_a_run_on_given_data_learns_is_said(make_run: Callable[..., str], stage: str, loss: str) -> None:
    run = Path(make_run())
    (run / "config.yaml").write_text(yaml.safe_dump({"stage": stage, "learn": {"steps": 6}, "run": {"device": "cpu"}}))
    rows = [{"step": step, "time/total": 1.0, loss: 1.0 / step, "policy/grad_norm": 1.0} for step in range(1, 7)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = " ".join(doctor(str(run)).stdout.split())
    assert f"({stage}), on cpu loss 1.000 → 0.167 " in shown and "?" not in shown and "on-policy" not in shown


def test_a_real_run_is_examined(trimtab: Trimtab, here: Path) -> None:
    assert trimtab("train", "learn.steps=6", "data.eval=rows.jsonl").code == 0
    told = trimtab("doctor", "--json", on="runs/it")
    assert told.exception is None
    assert told.json["run"] == {"folder": "runs/it", "steps": 6, "finished": True}
    judged = set(told.json["rules_healthy"]) | {finding["rule"] for finding in told.json["findings"]}
    expected = {
        "zero_signal",
        "truncation",
        "reward_failed",
        "ratio",
        "mismatch",
        "rollout_share",
        "kv_short",
        "packing",
    }
    assert expected <= judged, "the names of metrics are those that training writes"


def test_the_machine_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "trimtab.observe.doctor.machine.look_at_machine", lambda: look_at_machine(lambda: {"error": "no torch here"})
    )
    result = doctor("--json")
    assert result.exit_code == 1
    told = json.loads(result.stdout)
    assert told["healthy"] is False
    assert "torch" in [finding["rule"] for finding in told["findings"]]
    assert {"driver", "torch", "packages", "variables", "disks", "host_total_gib"} <= set(told["machine"])
    assert "torch cannot be imported or crashes" in result.stderr


@pytest.mark.parametrize("width", [40, 80, 120])
def test_reports_of_runs_fit_their_width(tmp_path: Path, width: int) -> None:
    from tests.observe.symptoms import record
    from trimtab.observe.doctor.examine import examine

    rows = healthy_rows()
    SYMPTOMS["entropy_collapse"](rows)
    run = record(rows)
    with (tmp_path / "out").open("w+") as file:
        print_report(file, run_report(tmp_path, run, examine(run)), width)
        file.seek(0)
        assert max(map(len, file.read().splitlines())) <= width


def test_a_run_is_examined_without_torch(make_run: Callable[..., str]) -> None:
    code = "import sys; sys.modules['torch'] = None; from trimtab.cli import app; app()"
    done = subprocess.run(
        [sys.executable, "-c", code, "doctor", make_run()], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_the_page_lists_every_rule_as_it_is() -> None:
    assert doctor("--rules").stdout == rules_table(RULES)
    assert rules_table(RULES) in (DOCS / "doctor.md").read_text(), "write it again: trimtab doctor --rules"
