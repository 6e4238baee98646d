"""The simulator against a real run: with the times and lengths that its folder has, a simulated step takes what a step took."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from tests.running import letters, train
from trimtab.base.errors import ConfigError
from trimtab.plan.simulate import Scenario, simulate
from trimtab.record.reader import RunReader
from trimtab.run.measured_times import measured_times, step_seconds

ROWS, SAMPLES, PROMPT = 8, 4, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    usual = {
        "data": [{"prompt": f"{n:03}+4="} for n in range(24)],
        "reward": letters,
        "learn": {"steps": 6, "prompts_per_step": 4, "samples_per_prompt": SAMPLES, "max_new_tokens": 24, "seed": 3,
                  "sampling": {"stop_token_ids": [5, 9]}},
        "run": {"device": "cpu", "rollout": {"max_sequences": ROWS}},
        "observe": {"samples_every": 1, "samples_rows": 16},
    }  # fmt: skip
    return train(model_folder, tmp_path_factory.mktemp("measured") / "run", usual).folder


def lengths_by_step(folder: Path) -> tuple[tuple[int, ...], ...]:
    """New tokens of every sequence, as they were sampled; without the first step's, which warms up."""
    reader = RunReader(folder)
    return tuple(tuple(row["tokens"] for row in reader.samples(step)) for step in range(2, 7))


def test_a_simulated_step_takes_what_a_step_of_the_run_took(folder: Path) -> None:
    found, lengths = measured_times(folder), lengths_by_step(folder)
    assert len({length for step in lengths for length in step}) > 5, "lengths differ"
    simulated = simulate(
        Scenario(
            (found.engine(ROWS),), lengths, SAMPLES, PROMPT, 0, found.reward_s, found.train_s, found.publish_s, True
        )
    )
    assert simulated.total / len(lengths) == pytest.approx(fmean(step_seconds(folder)), rel=0.1)
    assert found.train_s > 0 and found.prefill_token_s > 0 and all(seconds > 0 for _, seconds in found.step_s)


def test_a_folder_without_a_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--times: .* has no trace.json"):
        measured_times(tmp_path)
    (tmp_path / "trace.json").write_text("[\n")
    with pytest.raises(ConfigError, match="no decode steps and updates"):
        measured_times(tmp_path)
