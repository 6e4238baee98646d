"""A Ray cluster as a driver finds it: connected to, its nodes looked at, and refused by name where a run could not use them."""

from __future__ import annotations

import logging
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from trimtab.base.errors import ConfigError, Problem, TrainingError, cut
from trimtab.base.signals import STOP_SIGNALS
from trimtab.cluster import ray_look
from trimtab.cluster.ray_look import look

REACH_S = 5.0
"""For a connection to the address."""
LOOK_S = 60.0
"""For a node to answer: Ray may have to start a process there first."""

cloudpickle.register_pickle_by_value(ray_look)


@dataclass(frozen=True)
class NodeFacts:
    """A node that answered."""

    node: str
    host: str
    address: str
    resources: dict[str, float]
    """All that Ray may give of it."""
    versions: dict[str, str]
    cores: int
    memory: int
    """Bytes that are free."""
    gpus: tuple[tuple[str, ...], ...]
    """Index, name, MiB in all, MiB free and compute capability, as nvidia-smi tells them."""
    clock_off: float = 0.0
    """Seconds by which its clock is ahead of this one's, as far as can be seen."""
    networks: tuple[str, ...] = ()
    """InfiniBand and RoCE adapters that are up."""
    variables: dict[str, str] = field(default_factory=dict)
    """Those of NCCL and gloo."""

    def __str__(self) -> str:
        return self.host if self.host == self.address else f"{self.host} ({self.address})"

    @property
    def accelerator(self) -> str | None:
        """The resource by which Ray knows the kind of its GPUs."""
        return next((name for name in self.resources if name.startswith("accelerator_type:")), None)

    def count(self, kind: str) -> int:
        return int(self.resources.get(kind, 0))


@dataclass(frozen=True)
class Looked:
    """All nodes that Ray counts as alive."""

    nodes: tuple[NodeFacts, ...]
    silent: tuple[str, ...] = field(default=())
    """Hosts that did not answer."""

    def count(self, kind: str) -> int:
        return sum(node.count(kind) for node in self.nodes)


@contextmanager
def connect(address: str) -> Iterator[None]:
    """A driver of the cluster at this address, until the end of the block. One that the caller has connected stays so."""
    if ray.is_initialized():
        yield
        return
    _refuse_address(address)
    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, AssertionError, RayError) as error:
            raise ConfigError([_why_not(address, error)]) from error
        finally:
            if threading.current_thread() is threading.main_thread():
                for number, handler in handlers.items():  # Ray takes one, and a run that is stopped leaves a checkpoint
                    signal.signal(number, handler)
        yield
    finally:
        ray.shutdown()


def _refuse_address(address: str) -> None:
    """What would make Ray wait for a minute, or fail with its own words."""
    if "://" in address:
        what = f"{address} is the address of Ray's {'client' if address.startswith('ray:') else 'dashboard'}"
        fix = (
            "Start the run on a node of the cluster with HOST:PORT of Ray's head (port 6379), or as a job: ray job submit "
            f"--address {address} -- trimtab train ... Write local to run on this machine alone."
        )
        raise ConfigError([Problem("run.cluster", what, fix)])
    found = re.fullmatch(r"\[?([^\]]+?)\]?:(\d+)", address)
    if found is None:
        if address == "auto":
            return
        what, fix = f"{address!r} is no address", "Write HOST:PORT of Ray's head, such as 10.0.0.1:6379, or local."
        raise ConfigError([Problem("run.cluster", what, fix)])
    try:
        socket.create_connection((found[1], int(found[2])), REACH_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError([_none_there(address, str(error))]) from error


def _none_there(address: str, why: str) -> Problem:
    where = "on this machine" if address == "auto" else f"at {address}"
    fix = "Start it with `ray start --head`, write the address of its head, or write run.cluster: local."
    return Problem("run.cluster", f"no Ray cluster answers {where} ({cut(why)})", fix)


def _why_not(address: str, error: Exception) -> Problem:
    text = " ".join(str(error).split())
    if "ersion mismatch" in text:
        told = text.partition(":")[2].strip()
        return Problem(
            "run.cluster", f"the cluster at {address} has other versions. {told}", "Install the same versions."
        )
    if isinstance(error, ConnectionError):
        return _none_there(address, text)
    return Problem("run.cluster", f"cannot join the Ray cluster at {address}: {cut(text)}", "See docs/cluster.md.")


def look_at_nodes(patience_s: float = LOOK_S) -> Looked:
    """What each node says of itself."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    ask = ray.remote(num_cpus=0, max_retries=0)(look)
    asked = time.time()
    refs = [
        ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote()
        for node in alive
    ]
    ray.wait(refs, num_returns=len(refs), timeout=patience_s)
    found, silent = [], []
    for node, ref in zip(alive, refs):
        name = _name(node)
        try:
            told = ray.get(ref, timeout=0)
        except (RayError, TimeoutError):
            silent.append(name)
            ray.cancel(ref, force=True)
            continue
        found.append(_facts(node, told, asked, time.time()))
    return Looked(tuple(sorted(found, key=lambda each: (each.address, each.node))), tuple(silent))


def _facts(node: dict[str, Any], told: dict[str, Any], asked: float, answered: float) -> NodeFacts:
    clock = told["clock"]
    # It was read at some time between the two: only what lies outside shows.
    off = clock - answered if clock > answered else min(0.0, clock - asked)
    return NodeFacts(
        node=node["NodeID"],
        host=node["NodeManagerHostname"],
        address=node["NodeManagerAddress"],
        resources=dict(node["Resources"]),
        versions=told["versions"],
        cores=told["cores"],
        memory=told["memory"],
        gpus=tuple(tuple(gpu) for gpu in told["gpus"]),
        clock_off=off,
        networks=tuple(told["networks"]),
        variables=dict(told["variables"]),
    )


def _name(node: dict[str, Any]) -> str:
    host, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
    return host if host == address else f"{host} ({address})"


def refuse_unequal_nodes(nodes: Sequence[NodeFacts]) -> None:
    """Name what a node has otherwise than this process."""
    here = look()["versions"]
    for node in nodes:
        for name, value in here.items():
            theirs = node.versions[name]
            if theirs == value:
                continue
            package = name.removesuffix("'s source")
            has = f"has no {package}" if theirs == "none" else f"has {name} {theirs}"
            raise TrainingError(
                f"run.cluster: node {node} {has}, and this process has {value}. Install the same on every node "
                "(trimtab doctor --cluster shows all of them)."
            )
