"""The nodes of a Ray cluster as a doctor sees them: what they say of themselves, which folder they share, and how fast the
network between them is, measured."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trimtab.base.errors import ConfigError
from trimtab.cluster.link_rank import MODULE, LinkSetup
from trimtab.cluster.mesh import open_store
from trimtab.cluster.ranks import Ranks
from trimtab.cluster.ray import PLACE_S, ReservedDevices
from trimtab.cluster.ray_host import GROUPS, RankHost
from trimtab.cluster.ray_look import look
from trimtab.cluster.ray_nodes import Looked, NodeFacts, connect, look_at_nodes

SIZE, ROUNDS = 32 << 20, 4
"""Bytes that are sent to a node and back, and how often."""


@dataclass(frozen=True)
class MeasuredLink:
    one: str
    other: str
    bytes_per_s: float
    over: str
    """nccl or gloo."""


@dataclass(frozen=True)
class ClusterFacts:
    """A cluster, as looked at from this node."""

    address: str
    here: dict[str, str]
    """Versions of this process."""
    looked: Looked
    folder: str
    unshared: tuple[str, ...]
    """Nodes that do not see the folder as this one does."""
    links: tuple[MeasuredLink, ...]


def look_at_cluster(address: str, folder: Path) -> ClusterFacts:
    """Ask all nodes, and measure. Raises where there is no cluster, or where a node cannot run Trimtab."""
    here = look()["versions"]
    with connect(address):
        looked = look_at_nodes()
        able = [node for node in looked.nodes if node.versions["Trimtab's source"] == here["Trimtab's source"]]
        unshared, links = _measured(able, folder) if able else ((), ())
        return ClusterFacts(address, here, looked, str(folder.absolute()), unshared, links)


def _measured(nodes: list[NodeFacts], folder: Path) -> tuple[tuple[str, ...], tuple[MeasuredLink, ...]]:
    """Which nodes do not share the folder, and the rate between each node and the next."""
    free = ray.available_resources().get("GPU", 0)
    cuda = len(nodes) > 1 and all(node.count("GPU") for node in nodes) and free >= ray.cluster_resources().get("GPU", 0)
    placed = _actors(nodes, cuda)
    unshared = tuple(str(node) for node, shares in zip(nodes, placed.shares(folder)) if not shares)
    if len(nodes) == 1:
        placed.close()
        return unshared, ()
    host = str(ray.util.get_node_ip_address())
    store = open_store(host)
    backend, device = ("nccl", "cuda:0") if cuda else ("gloo", "cpu")
    setups = [LinkSetup(host, store.port, rank, len(nodes), backend, device) for rank in range(len(nodes))]
    # Nodes need not share a folder to be measured: each writes its log where it has its temporary files.
    logs = Path(tempfile.mkdtemp(prefix="trimtab-links-"))
    ranks = Ranks(MODULE, setups, logs, variables=[{}] * len(nodes), start=placed.start, on_end=placed.close)
    ranks.store = store
    try:
        ranks.wait_until_built()
        pairs = [(one, (one + 1) % len(nodes)) for one in range(len(nodes) if len(nodes) > 2 else 1)]
        found = []
        for one, other in pairs:
            rate = ranks.ask("exchange", one, other, SIZE, ROUNDS)[one]
            found.append(MeasuredLink(str(nodes[one]), str(nodes[other]), rate, backend))
        return unshared, tuple(found)
    finally:
        ranks.close()


def _actors(nodes: list[NodeFacts], cuda: bool) -> ReservedDevices:
    """One on each node. They reserve nothing but a GPU, where all are free: a cluster that is in use can be looked at."""
    host = ray.remote(concurrency_groups=GROUPS)(RankHost)
    own = {"num_cpus": 0, "num_gpus": 1 if cuda else 0}
    strategies = [NodeAffinitySchedulingStrategy(node.node, soft=False) for node in nodes]
    actors = [host.options(scheduling_strategy=strategy, **own).remote() for strategy in strategies]
    try:
        where = ray.get([actor.where.remote() for actor in actors], timeout=PLACE_S)
    except RayError as error:
        for actor in actors:
            ray.kill(actor)
        raise ConfigError(f"Ray cannot start actors on all nodes: {error}") from error
    return ReservedDevices(None, actors, where)
