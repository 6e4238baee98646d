"""`ray job submit -- trimtab train`: a driver that is a Ray job trains on ranks of its cluster and finishes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.ray_cluster import nodes
from trimtab.record.reader import RunReader
from trimtab.record.sinks import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
REWARD = """
def letters(completions, **_):
    return [float(sum(character in "abcdefghij" for character in text)) for text in completions]
"""


@pytest.mark.parametrize("shipped", [True, False], ids=["with its folder", "on two nodes"])
def test_a_submitted_run_finishes(model_folder: Path, tmp_path: Path, shipped: bool) -> None:
    """Ray ships a folder to every node, under one path: two nodes on one machine would take it from each other. So one has it."""
    work, run = tmp_path / "work", tmp_path / "run"
    work.mkdir()
    (work / "mine.py").write_text(REWARD)
    config: dict[str, Any] = {
        "model": {"path": str(model_folder)},
        "data": {"train": "task:arithmetic", "options": {"size": 12}},
        "reward": [{"fn": "mine.py:letters"}],
        "learn": {"steps": 2, "prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 6},
        "run": {"device": "cpu", "threads": 1, "reward_workers": 1},
        "observe": {"dir": str(run), "tensorboard": False},
    }
    bins = Path(sys.executable).parent
    if shipped:
        config["run"]["devices"], folder, place = 2, ["--working-dir", work], Path("config.yaml")
    else:
        folder, place = [], work / "config.yaml"
    (work / "config.yaml").write_text(yaml.safe_dump(config))
    with nodes(1 if shipped else 2, cpus=2 if shipped else 1, dashboard=True) as cluster:
        address = f"http://{cluster.head_node.address_info['webui_url']}"
        done = subprocess.run(
            [bins / "ray", "job", "submit", "--address", address, *folder, "--", bins / "trimtab", "train", place],
            capture_output=True, text=True, timeout=350, cwd=tmp_path,
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "succeeded" in done.stdout
    assert [row["step"] for row in read_metrics(run)] == [1, 2]
    facts = RunReader(run).run()
    assert facts["state"] == "finished" and facts["device"]["count"] == 2, json.dumps(facts["device"])
