"""A Ray cluster of several nodes on this machine, for tests: real nodes, each with its own processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import forking
import pytest
from ray.cluster_utils import Cluster

ROOT = Path(__file__).parents[2]
MEMORY = 80 << 20
"""Of a node's object store, the least that Ray takes."""


@contextmanager
def nodes(count: int, cpus: int = 1, dashboard: bool = False) -> Iterator[Cluster]:
    """Each with so many CPUs. Ranks are forked from a process that has imported what takes long."""
    warm = forking.Warm(sys.executable, ["trimtab.run.rank"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.setenv("RAY_DISABLE_IMPORT_WARNING", "1")
        patch.setenv("RAY_enable_metrics_collection", "0")
        patch.setattr("trimtab.cluster.ray.RANK_PYTHON", [warm.python, "-u", "-P"])
        settings = {
            "num_cpus": cpus,
            "object_store_memory": MEMORY,
            "include_dashboard": dashboard,
            "dashboard_port": 0,
        }
        cluster = Cluster(initialize_head=True, head_node_args=settings)
        try:
            for _ in range(count - 1):
                cluster.add_node(num_cpus=cpus, object_store_memory=MEMORY)
            yield cluster
        finally:
            cluster.shutdown()
            warm.close()
