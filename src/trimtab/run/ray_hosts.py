"""The Ray cluster of a run: which one, what its nodes have, and the machine that a plan sees in them. The loop does not know."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.units import MIB
from trimtab.config.row_ranks import row_ranks
from trimtab.config.run import Run
from trimtab.plan.devices import nearest
from trimtab.plan.job import Machine
from trimtab.plan.visible import VisibleDevice, choose_devices
from trimtab.rollout.external.find import engines_here
from trimtab.run.machine import as_planned, memory_limit, pick_device
from trimtab.workers.places import WorkerPlaces

if TYPE_CHECKING:
    from trimtab.cluster.ray import ReservedDevices
    from trimtab.cluster.ray_nodes import Looked, NodeFacts

Kind = Literal["CPU", "GPU"]
SETTLE_S = 20.0
"""How long devices of ranks that have just ended may still be counted as taken."""
POLL_S = 2.0


@dataclass(frozen=True)
class RayHosts:
    """Nodes that answered."""

    address: str
    nodes: Sequence[NodeFacts]
    kind: Kind
    most: int | None = None
    """Devices that are left, where a run that had more goes on with these."""

    @property
    def device(self) -> torch.device:
        """Where models are. The driver has no such device."""
        return torch.device("cuda" if self.kind == "GPU" else "cpu")

    @property
    def driver(self) -> str:
        """The driver's machine, as nodes see it."""
        import ray

        return str(ray.util.get_node_ip_address())

    def asked(self, run: Run) -> Run:
        """What a plan is asked for: the number of devices is that of a run, but for those that were lost."""
        count = run.devices
        if count == "auto" and self.kind == "CPU":
            count = sum(node.count("CPU") > 0 for node in self.nodes)
        changes: dict[str, object] = {"cluster": self.address}
        if self.most is not None and count != "auto" and count > self.most:
            count = self.most
            if count == 1:
                changes["shard"] = "auto"
            if run.shard_devices != "auto" and count % run.shard_devices:
                changes["shard_devices"] = "auto"
            if any(count % ranks for ranks in row_ranks(run).values()):
                changes["sequence_parallel"] = "auto"
        return run.with_values({**changes, "devices": count})

    def machine(self, run: Run) -> tuple[Machine, tuple[str, ...]]:
        """The cluster as a plan sees it, and what the user should know of devices that are left out. On CPUs it is one host with
        the cores and the memory of all, as if all were as small as the smallest."""
        if self.kind == "CPU":
            self._refuse_few_cpus(run)
            nodes = [node for node in self.nodes if node.count("CPU")]
            memory = len(nodes) * min(node.memory for node in nodes)
            cores = len(nodes) * min(node.cores for node in nodes)
            return Machine(nearest("CPU", memory), 1, memory, cores, cpu=True, here=True), ()
        found = _visible(self.nodes)
        chosen = choose_devices(run, found, "the Ray cluster")
        first, count = chosen.devices[0], len(chosen.devices)
        device = as_planned(nearest(first.name, chosen.free, first.total), self.device, first.capability)
        per_host = max(node.count("GPU") for node in self.nodes)
        memory, cores = min(node.memory for node in self.nodes), min(node.cores for node in self.nodes)
        machine = Machine(device, count, memory, cores, per_host=per_host, engines=engines_here(), here=True)
        return machine, tuple(chosen.notes)

    def place(self, count: int) -> ReservedDevices:
        """Reserve devices and start actors on them."""
        from trimtab.cluster.ray import place

        kinds = {node.accelerator for node in self.nodes if node.count("GPU")}
        most = max(self.nodes, key=lambda node: node.count("GPU"))
        return place(count, self.kind, most.accelerator if self.kind == "GPU" and len(kinds) > 1 else None)

    def worker_places(self) -> WorkerPlaces | None:
        """Where rewards and environments run: on all hosts; None where there is only one."""
        from trimtab.cluster.ray_workers import ClusterPlaces

        return None if len(self.nodes) < 2 else ClusterPlaces([(node.node, str(node)) for node in self.nodes])

    def _refuse_few_cpus(self, run: Run) -> None:
        there = sum(node.count("CPU") for node in self.nodes)
        if run.devices != "auto" and run.devices > there:
            each = ", ".join(f"{node}: {node.count('CPU')}" for node in self.nodes)
            what = f"is {run.devices}, but the Ray cluster has {there} CPUs ({each}), and a rank asks for one"
            raise ConfigError([Problem("run.devices", what, f"Write {there} or less, or add nodes.")])


def _visible(nodes: Sequence[NodeFacts]) -> list[VisibleDevice]:
    """The GPUs that Ray may give, of those that the nodes have."""
    found: list[VisibleDevice] = []
    for node in nodes:
        for _, name, total, free, capability in node.gpus[: node.count("GPU")]:
            major, _, minor = capability.partition(".")
            sizes = int(total) * MIB, int(free) * MIB
            found.append(VisibleDevice(len(found), name, *sizes, (int(major), int(minor or 0))))
    return found


def open_device(run: Run, hosts: RayHosts | None, stack: ExitStack) -> torch.device:
    """Where models are: on devices of the cluster or, without one, on one of this process's, which takes no more of it than the
    run may."""
    if hosts is not None:
        return hosts.device
    device = pick_device(run)
    stack.enter_context(memory_limit(run, device))
    return device


def paths_of(config: Any, models: Sequence[str], checkpoint: Path | None) -> dict[str, str]:
    """Folders and files that ranks read, by the key that names them: those that are here. Others are names on the hub."""
    critic = getattr(getattr(config.learn, "critic", None), "path", None)
    named = {"model.path": config.model.path, "learn.critic.path": critic, "the newest checkpoint": checkpoint}
    named |= {f"reward model {path}": path for path in models}
    return {key: os.path.abspath(path) for key, path in named.items() if path is not None and os.path.exists(path)}


def address_of(run: Run) -> str | None:
    """Of the Ray cluster that a run is for; None: it runs on this machine alone."""
    if run.cluster == "local":
        return None
    found = os.environ.get("RAY_ADDRESS") if run.cluster == "auto" else run.cluster
    if found and find_spec("ray") is None:
        said = "RAY_ADDRESS is set" if run.cluster == "auto" else f"is {found}"
        fix = "pip install 'trimtab[ray]', or write run.cluster: local."
        raise ConfigError([Problem("run.cluster", f"{said}, but Ray is not installed here", fix)])
    return found or None


@contextmanager
def open_hosts(run: Run, before: int = 0, tell: Callable[[str], None] = lambda what: None) -> Iterator[RayHosts | None]:
    """The nodes of a run's cluster, as long as the block; None where it runs on this machine alone. `before`: devices that the
    run had before it lost its ranks, for which it waits `run.wait_for_hosts`."""
    address = address_of(run)
    if address is None:
        yield None
        return
    from trimtab.cluster.ray_nodes import connect, refuse_unequal_nodes

    if run.external and run.cut > 1:
        what = "on a Ray cluster a rank has one GPU, and cannot cut its engine over several"
        raise ConfigError([Problem("run.rollout.tensor_parallel", what, "Leave it out.")])
    tell(f"looking at the Ray cluster at {address}")
    with connect(address):
        looked = _whole(run, before, tell)
        refuse_unequal_nodes(looked.nodes)
        kind = _kind(run, looked)
        left = looked.count(kind)
        yield RayHosts(address, looked.nodes, kind, left if before > left else None)


def _kind(run: Run, looked: Looked) -> Kind:
    if run.device == "cpu" or (run.device == "auto" and not looked.count("GPU")):
        return "CPU"
    if not looked.count("GPU"):
        what = "is cuda, but no node of the Ray cluster has a GPU"
        raise ConfigError([Problem("run.device", what, "Write auto or cpu, or start nodes with GPUs.")])
    return "GPU"


def _whole(run: Run, before: int, tell: Callable[[str], None]) -> Looked:
    """All nodes that are there; after a loss once there are enough, or once the wait is over and Ray has given up the others."""
    from trimtab.cluster.ray_nodes import look_at_nodes

    deadline = time.monotonic() + max(run.wait_for_hosts, SETTLE_S)
    while True:
        looked = look_at_nodes()
        if not before:
            if looked.silent:
                what = f"Ray counts {', '.join(looked.silent)} as alive, but no answer comes from there"
                raise ConfigError([Problem("run.cluster", what, "Start Ray there again, or stop it there.")])
            return looked
        kind = _kind(run.with_values({"device": "auto"}), looked)
        if not looked.silent and (looked.count(kind) >= before or time.monotonic() > deadline):
            return looked
        missing = f": {', '.join(looked.silent)} does not answer" if looked.silent else ""
        tell(f"waiting for {before} devices, the cluster has {looked.count(kind)}{missing}")
        time.sleep(POLL_S)
