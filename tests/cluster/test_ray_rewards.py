"""Rewards and environments on all hosts of a Ray cluster: the same values, the user's code shipped, and a node that cannot import
it named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.cluster.ray_cluster import nodes
from tests.reward.conftest import made_group
from trimtab.base.errors import RewardError
from trimtab.cluster import ray_workers
from trimtab.cluster.ray_workers import ClusterPlaces, python_files
from trimtab.config.schema import RewardPart
from trimtab.reward.scorer import Scorer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]  # test_ray.py has the cover, on a cluster that is there
REWARD = """
import os, time
import beside

def where(completions, **_):
    time.sleep(0.05)
    with open(beside.LOG, "a") as log:
        log.write(os.environ.get("RAY_RAYLET_PID", "driver") + "\\n")
    return [float(len(text)) for text in completions]
"""


@pytest.fixture(scope="module")
def places() -> Iterator[ClusterPlaces]:
    with nodes(2) as found:
        ray.init(found.address, log_to_driver=False)
        try:
            yield ClusterPlaces([(node["NodeID"], node["NodeManagerAddress"]) for node in ray.nodes()])
        finally:
            ray.shutdown()


def scored(folder: Path, places: ClusterPlaces, groups: int = 12) -> list[float | None]:
    part = RewardPart(fn=f"{folder}/mine.py:where")
    with Scorer([part], workers=1, base_dir=folder, places=places) as scorer:
        made = [made_group("a" * number, "b" * (number + 1)) for number in range(1, groups + 1)]
        for group in made:
            scorer.submit(group)
        return [t.reward for group in scorer.collect() for t in group.trajectories]


def code(folder: Path) -> Path:
    (folder / "mine.py").write_text(REWARD)
    (folder / "beside.py").write_text(f"LOG = {str(folder / 'log.txt')!r}\n")
    return folder / "log.txt"


EXPECTED = [float(size) for number in range(1, 13) for size in (number, number + 1)]


def test_all_hosts_score_and_the_values_are_the_same(places: ClusterPlaces, tmp_path: Path) -> None:
    log = code(tmp_path)
    assert scored(tmp_path, places) == EXPECTED
    assert len(set(log.read_text().split())) == 2, "the driver's machine and another"


def test_code_that_a_host_has_not_is_shipped_with_what_lies_beside_it(
    places: ClusterPlaces, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the host has an older file."""
    log = code(tmp_path)
    monkeypatch.setattr(ray_workers, "digest_of", lambda file: "another")
    (tmp_path / "mine.py").write_text(REWARD.replace('"driver")', '"driver") + __file__'))
    assert scored(tmp_path, places) == EXPECTED
    files = set(log.read_text().split())
    assert len(files) == 2 and any("trimtab-code-" in file for file in files)


def test_a_node_that_cannot_import_the_reward_file_is_named(places: ClusterPlaces, tmp_path: Path) -> None:
    code(tmp_path)
    lacking = 'if os.environ.get("RAY_RAYLET_PID"):\n    import a_package_that_is_not_there\n'
    (tmp_path / "mine.py").write_text(REWARD.replace("import beside", f"import beside\n{lacking}"))
    with pytest.raises(RewardError, match=r"a_package_that_is_not_there.*\(on node \d"):
        scored(tmp_path, places)


def test_a_worker_whose_host_is_lost_costs_its_call_and_no_more(places: ClusterPlaces, tmp_path: Path) -> None:
    log = code(tmp_path)
    dying = 'if os.environ.get("RAY_RAYLET_PID") and not os.path.exists(beside.LOG + ".killed"):\n'
    dying += '        open(beside.LOG + ".killed", "w").close()\n'
    dying += '        __import__("psutil").Process().parents()[2].kill()\n'
    (tmp_path / "mine.py").write_text(REWARD.replace("    time.sleep(0.05)", f"    time.sleep(0.05)\n    {dying}"))
    assert scored(tmp_path, places) == EXPECTED, "the call was repeated, sample by sample, elsewhere"
    assert (tmp_path / "log.txt.killed").exists() and log.exists()


def test_what_is_shipped_is_python_near_the_top_and_not_too_much(tmp_path: Path, monkeypatch) -> None:
    for name in ("a.py", "deep/er/b.py", "data.bin", ".git/c.py", "venv/d.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x" * 100)
    assert sorted(python_files([str(tmp_path)])) == [f"{tmp_path}/a.py", f"{tmp_path}/deep/er/b.py"]
    monkeypatch.setattr(ray_workers, "MOST_BYTES", 150)
    assert list(python_files([str(tmp_path)])) == [f"{tmp_path}/a.py"]
