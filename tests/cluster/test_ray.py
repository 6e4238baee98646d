"""Runs on a Ray cluster of two nodes: the weights of local ranks, whatever is lost on the way; and what is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests import running
from tests.cluster.conftest import USUAL, Run
from tests.cluster.ray_cluster import nodes

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with nodes(2) as address:
        yield address


@pytest.fixture
def on_ray(cluster: str, model_folder: Path, tmp_path: Path) -> Iterator[Run]:
    """Train on two ranks of the cluster. None of their processes is left at the end."""
    usual = {**USUAL, "run": {**USUAL["run"], "cluster": cluster}}
    yield lambda name="run", model=model_folder, **changes: running.train(model, tmp_path / name, usual, changes)
    assert not running.left(ranks(), 10.0)


def ranks() -> list[psutil.Process]:
    """Processes of ranks, guardians included."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if (
            "trimtab.workers.guardian" in (process.info["cmdline"] or [])
            and "trimtab.run.rank" in process.info["cmdline"]
        ):
            found.append(process)
    return found


def weights(folder: Path) -> bytes:
    return (folder / "final/model.safetensors").read_bytes()


def test_weights_are_those_of_local_ranks(on_ray, whole: running.Trained) -> None:
    found = on_ray()
    assert weights(found.folder) == weights(whole.folder)
    assert [row["step"] for row in found.metrics] == [1, 2, 3]
