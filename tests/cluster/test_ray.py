"""Runs on a Ray cluster of two nodes: the weights of local ranks, whatever is lost on the way; and what is refused by name."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import running
from tests.cluster.conftest import USUAL, Run
from tests.cluster.ray_cluster import nodes
from trimtab.base.errors import ConfigError, RewardError
from trimtab.cli.doctor import doctor

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with nodes(2) as found:
        yield found.address


@pytest.fixture
def on_ray(cluster: str, model_folder: Path, tmp_path: Path) -> Iterator[Run]:
    """Train on two ranks of the cluster. None of their processes is left at the end."""
    usual = {**USUAL, "run": {**USUAL["run"], "cluster": cluster}}
    yield lambda name="run", model=model_folder, **changes: running.train(model, tmp_path / name, usual, changes)
    assert not running.left(ranks(), 10.0)


def ranks() -> list[psutil.Process]:
    """The first process of each rank."""
    lines = ((process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"]))
    return [
        process
        for process, line in lines
        if "warm.py" in " ".join(line) and {"trimtab.run.rank", "trimtab.cluster.link_rank"} & set(line)
    ]


def kill_actor() -> None:
    """SIGKILL for a process of Ray's that has a rank: its guardians know the number."""
    line = ranks()[0].cmdline()
    os.kill(int(line[line.index("trimtab.workers.guardian") + 1]), signal.SIGKILL)


def weights(folder: Path) -> bytes:
    return (folder / "final/model.safetensors").read_bytes()


def test_weights_are_those_of_local_ranks(on_ray, whole: running.Trained) -> None:
    found = on_ray()
    assert weights(found.folder) == weights(whole.folder)
    assert [row["step"] for row in found.metrics] == [1, 2, 3]
    assert "rank-1.log" in os.listdir(found.folder / "ranks")


def test_a_lost_actor_and_a_lost_rank_are_named_and_the_run_goes_on(on_ray, whole: running.Trained, capsys) -> None:
    acts = {1: kill_actor, 2: lambda: ranks()[0].kill()}

    def lose(step: int, metrics: object) -> None:
        acts[step]() if step in acts else None

    found = on_ray(callbacks=[lose])
    said = capsys.readouterr().out.replace("\n", " ")
    assert weights(found.folder) == weights(whole.folder)
    assert found.metrics[-1]["run/rank_restarts"] == 2
    assert "is lost: its Ray actor died" in said
    assert "is lost: its process ended: killed by SIGKILL" in said
    assert "(restart 2 of at most 3)" in said
    assert f"on {os.uname().nodename}" in said, "the host is named"


def test_more_devices_than_the_cluster_has_are_refused(on_ray) -> None:
    with pytest.raises(
        ConfigError, match=r"run\.devices: is 3, but the Ray cluster has 2 CPUs \(.*: 1, .*: 1\), and a"
    ):
        on_ray(run={"devices": 3})


def test_a_model_that_a_node_lacks_is_named(on_ray, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("trimtab.run.assemble_ranks.paths_of", lambda *_: {"model.path": "/nowhere/model"})
    with pytest.raises(ConfigError, match=r"model\.path: node .* has no /nowhere/model\. Put it there"):
        on_ray()
    assert not (tmp_path / "run/config.yaml").exists()


def test_the_doctor_looks_at_all_nodes_and_measures_the_link_between_them(
    cluster: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    doctor(cluster=cluster, as_json=True)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["healthy"] and not found["findings"]
    assert [node["resources"]["CPU"] for node in found["cluster"]["looked"]["nodes"]] == [1, 1]
    (link,) = found["cluster"]["links"]
    assert link["bytes_per_s"] > 1e6 and link["over"] == "gloo"
    assert not running.left(ranks(), 10.0) and not list(tmp_path.iterdir())


REWARD = """
import os
{more}

def where(completions, **_):
    with open({log!r}, "a") as log:
        log.write(os.environ.get("RAY_RAYLET_PID", "driver") + chr(10))
    return [float(sum(character in "abcdefghij" for character in text)) for text in completions]
"""


def test_rewards_run_on_all_hosts_and_change_nothing(on_ray, whole: running.Trained, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    (tmp_path / "mine.py").write_text(REWARD.format(log=str(log), more=""))
    assert weights(on_ray(reward=f"{tmp_path}/mine.py:where").folder) == weights(whole.folder)
    assert len(set(log.read_text().split())) == 2


def test_a_node_that_cannot_import_the_reward_file_is_named(on_ray, tmp_path: Path) -> None:
    lacking = 'if os.environ.get("RAY_RAYLET_PID"): import a_package_that_is_not_there'
    (tmp_path / "mine.py").write_text(REWARD.format(log="", more=lacking))
    with pytest.raises(RewardError, match=r"(?s)a_package_that_is_not_there.*\(on node "):
        on_ray(reward=f"{tmp_path}/mine.py:where")
