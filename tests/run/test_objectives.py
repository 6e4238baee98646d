"""Whole runs with several objectives: tasks in metrics, parts on one scale, a judge beside another reward and one that dies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import running
from tests.reward.local_judge import LocalJudge
from tests.running import letters
from trimtab.base.errors import ConfigError, DataError, RewardError
from trimtab.record.sinks import read_metrics

ROWS = [{"prompt": f"{a}+{b}=", "answer": str(a + b), "kind": f"from {a % 2}"} for a in range(6) for b in range(5)]
LEARN = {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 6, "lr": 1e-2}
RUN = {"device": "cpu", "threads": 1, "reward_workers": 1}


def train(model_folder: Path, folder: Path, **changes: Any) -> list[dict[str, Any]]:
    usual = {"data": {"train": ROWS, "task": "kind"}, "reward": letters, "learn": LEARN, "run": RUN}
    return running.train(model_folder, folder, usual, changes).metrics


def test_tasks_have_metrics_that_add_up_to_the_steps(model_folder: Path, tmp_path: Path) -> None:
    data = {"train": ROWS, "eval": ROWS[:8], "task": "kind"}
    bands = {"from 1": [0.0, 1.0]}
    metrics = train(
        model_folder, tmp_path / "run", data=data, learn={"kl": {"coef": 0.01}}, observe={"kl_bands": bands}
    )
    row, names = metrics[2], ("from_0", "from_1")
    weights = {name: row.get(f"reward/task/{name}/samples", 0.0) for name in names}
    assert sum(weights.values()) == 16
    assert sum(weights[n] * row[f"reward/task/{n}/mean"] for n in names) / 16 == pytest.approx(row["reward/mean"])
    lengths = sum(weights[n] * row[f"response/task/{n}/length_mean"] for n in names)
    assert lengths / 16 == pytest.approx(row["response/length_mean"])
    assert {f"response/task/{n}/truncated" for n in names} | {f"reward/task/{n}/zero_std_groups" for n in names} <= set(
        row
    )
    tokens = {n: weights[n] * row[f"response/task/{n}/length_mean"] for n in names}
    kl = sum(tokens[n] * row[f"policy/task/{n}/kl_ref"] for n in names) / lengths
    assert kl == pytest.approx(row["policy/kl_ref"])
    assert row["policy/kl_ref"] > 0
    scores = [row[f"eval/task/{n}/pass@1"] * row[f"eval/task/{n}/prompts"] for n in names]
    assert sum(scores) / row["eval/prompts"] == pytest.approx(row["eval/pass@1"])


def test_tasks_without_a_reference_have_no_kl(model_folder: Path, tmp_path: Path) -> None:
    row = train(model_folder, tmp_path / "run", learn={"steps": 1})[-1]
    assert not [name for name in row if name.endswith("/kl_ref")]
    assert "reward/task/from_0/mean" in row or "reward/task/from_1/mean" in row


@pytest.mark.parametrize(
    ("data", "observe", "message"),
    [
        ({"task": "knd"}, {}, r"no column 'knd'; .* Did you mean 'kind'\? Set data\.task to the column with the tasks"),
        ({"eval": [{"prompt": "1+1="}]}, {}, r"data\.eval has no column 'kind'"),
        (
            {"train": [*ROWS, {"prompt": "1", "kind": None}]},
            {},
            r"row 31 .* the task must be text or a number, but is None",
        ),
        ({}, {"kl_bands": {"from 3": [0, 1]}}, r"kl_bands\.from 3: no row of data\.train has the task 'from 3'"),
    ],
)
def test_what_is_wrong_with_tasks_is_said_before_any_weight_is_loaded(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, data: Any, observe: Any, message: str
) -> None:
    monkeypatch.setattr("trimtab.run.models.load_model", None)
    with pytest.raises((DataError, ConfigError), match=message):
        train(
            model_folder,
            tmp_path / "run",
            data={"train": ROWS, "task": "kind", **data},
            learn={"kl": {"coef": 0.01}},
            observe=observe,
        )
    assert not (tmp_path / "run").exists()


def test_a_scale_of_one_part_changes_nothing_once_parts_are_normalised(model_folder: Path, tmp_path: Path) -> None:
    def weights(name: str, normalize: str, scale: float) -> dict[str, torch.Tensor]:
        def scaled(completions: list[str], **_: Any) -> list[float]:
            return [scale * sum(character.isdigit() for character in c) + scale for c in completions]

        reward = [{"fn": letters, "normalize": normalize}, {"fn": scaled, "normalize": normalize}]
        metrics = train(model_folder, tmp_path / name, reward=reward)
        assert metrics[-1]["reward/mean"] == pytest.approx(metrics[-1]["reward/letters"] + metrics[-1]["reward/scaled"])
        return load_file(tmp_path / name / "final/model.safetensors")

    one, hundred = weights("one", "group", 1.0), weights("hundred", "group", 128.0)
    assert all(torch.equal(one[name], hundred[name]) for name in one)
    plain = weights("plain", "none", 128.0)
    assert any(not torch.equal(one[name], plain[name]) for name in one)


@pytest.fixture
def server() -> Iterator[LocalJudge]:
    started = LocalJudge()
    yield started
    started.stop()


def with_judge(server: LocalJudge, **args: Any) -> list[dict[str, Any]]:
    asked = server.args(prompt="{prompt} {completion} {answer}: score 6", retries=0, **args)
    return [
        {"fn": letters, "weight": 1.0},
        {"fn": "judge", "weight": 0.5, "timeout_s": 5.0, "args": asked},
    ]


def test_a_judge_is_one_of_two_parts(model_folder: Path, tmp_path: Path, server: LocalJudge) -> None:
    metrics = train(model_folder, tmp_path / "run", reward=with_judge(server, cache="disk"))
    for row in metrics:
        assert row["reward/judge"] == pytest.approx(0.6)
        assert row["reward/mean"] == pytest.approx(row["reward/letters"] + 0.3)
        counts = {
            name: row[f"reward/judge/{name}"] for name in ("requests", "scored", "cache_hits", "failed", "retries")
        }
        assert counts["scored"] + counts["cache_hits"] == 16 and counts["requests"] == counts["scored"]
        assert counts["failed"] == counts["retries"] == row["reward/failed"] == 0
        low, high, most = (row[f"reward/judge/latency_{name}_s"] for name in ("p50", "p95", "max"))
        assert 0 < low <= high <= most
        assert row["reward/judge/wait_s"] >= 0
    assert (tmp_path / "run/judge-cache.jsonl").stat().st_size > 0
    assert server.seen()["requests"] == 1 + sum(row["reward/judge/requests"] for row in metrics)


def dying(server: LocalJudge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is gone after the first step."""
    from trimtab.run import loop

    original = loop.update

    def update(run: Any, groups: Any) -> Any:
        done = original(run, groups)
        server.stop()
        return done

    monkeypatch.setattr(loop, "update", update)


def test_a_judge_that_dies_stops_the_run_and_when_it_is_back_the_run_goes_on(
    model_folder: Path, tmp_path: Path, server: LocalJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    dying(server, monkeypatch)
    reward, folder = with_judge(server, cache=False), tmp_path / "run"
    changes = {"reward": reward, "learn": {"steps": 3}, "observe": {"checkpoint_every": 1}}
    stopped = r"(?s)16 of 16 samples have no reward .*max_failed_rewards.*reward 'judge' has no score"
    with pytest.raises(RewardError, match=stopped):
        train(model_folder, folder, **changes)
    assert [row["step"] for row in read_metrics(folder)] == [1]
    monkeypatch.undo()
    with pytest.raises(RewardError, match=r"is not reachable .* Start it, or correct url"):
        train(model_folder, folder, **changes, resume=True)
    again = LocalJudge(port=server.port)
    try:
        metrics = train(model_folder, folder, **changes, resume=True)
    finally:
        again.stop()
    assert [row["step"] for row in metrics] == [1, 2, 3]


def test_a_judge_that_fails_for_some_costs_those_and_the_run_goes_on(
    model_folder: Path, tmp_path: Path, server: LocalJudge
) -> None:
    """Rows of level 0 are scored 0, those of level 1 get an answer without a score."""
    server.become("half")
    asked = server.args(prompt="{completion} score {level}", retries=0, cache=False)
    rows = [{**row, "level": number % 2} for number, row in enumerate(ROWS)]
    metrics = train(
        model_folder,
        tmp_path / "run",
        data=rows,
        reward=[letters, {"fn": "judge", "args": asked}],
        observe={"max_failed_rewards": 0.99},
    )
    for row in metrics:
        failed = row.get("reward/judge/failed_unparsable", 0.0)
        assert row["reward/failed"] == failed == row["reward/judge/failed"]
        assert row["run/samples_trained"] + row.get("run/dropped_reward_failed", 0.0) == 16
        assert row.get("reward/judge", 0.0) == 0.0, "level 0 is the only score that the server gives"
    assert sum(row["reward/failed"] for row in metrics) > 0


def test_the_key_is_not_in_the_run_folder(
    model_folder: Path, tmp_path: Path, server: LocalJudge, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sk-very-secret")
    folder = tmp_path / "run"
    train(model_folder, folder, reward=with_judge(server, api_key_env="JUDGE_KEY", cache="disk"), learn={"steps": 1})
    assert set(server.seen()["keys"]) == {"Bearer sk-very-secret"}
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert "JUDGE_KEY" in (folder / "config.yaml").read_text()
    assert not [path for path in files if b"sk-very-secret" in path.read_bytes()]
