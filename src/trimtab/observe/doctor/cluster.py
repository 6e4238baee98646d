"""What the doctor says of a Ray cluster. Pure: cluster/ray_links.py looks at it and measures."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import Any

from trimtab.base.units import GIB
from trimtab.cluster.ray_links import ClusterFacts
from trimtab.observe.doctor.finding import Finding, Level

MAX_CLOCK_OFF_S = 1.0
SLOW_SHARE = 0.5
"""A link that has less than this of the median's rate is slow."""


def cluster_findings(facts: ClusterFacts) -> list[Finding]:
    return [*_software(facts), *_hosts(facts), *_variables(facts), *_links(facts)]


def cluster_facts(facts: ClusterFacts) -> list[tuple[str, str]]:
    """Name and value, a line each."""
    lines = [("cluster", f"{facts.address}, {len(facts.looked.nodes)} nodes"), ("shared folder", facts.folder)]
    for node in facts.looked.nodes:
        names = sorted({gpu[1] for gpu in node.gpus})
        gpus = f"{node.count('GPU')} × {' or '.join(names)}, " if node.gpus else ""
        network = f", {', '.join(node.networks)}" if node.networks else ""
        lines.append((str(node), f"{gpus}{node.count('CPU')} CPUs, {node.memory / GIB:.0f} GiB free{network}"))
    for link in facts.links:
        lines.append(
            (f"{link.one} - {link.other}", f"{link.bytes_per_s / 1e9:.2f} GB/s each way in turn ({link.over})")
        )
    return lines


def cluster_json(facts: ClusterFacts) -> dict[str, Any]:
    return asdict(facts)


def _software(facts: ClusterFacts) -> Iterator[Finding]:
    for node in facts.looked.nodes:
        other = [
            f"{name} {node.versions[name]}, here {value}"
            for name, value in facts.here.items()
            if node.versions[name] != value
        ]
        if other:
            yield _found(
                "cluster_versions",
                "bad",
                "a node has other software",
                "versions",
                "the same on all nodes",
                f"{node}: {'; '.join(other)}",
                "it was installed at another time, or Ray was started there in another environment",
                "install the same versions there, in the environment in which Ray is started (an image for all: docs/cluster.md)",
            )


def _hosts(facts: ClusterFacts) -> Iterator[Finding]:
    if facts.looked.silent:
        yield _found(
            "cluster_silent",
            "bad",
            "a node does not answer",
            "nodes",
            "all answer",
            ", ".join(facts.looked.silent),
            "it is cut off, or its Ray hangs",
            "start Ray there again",
        )
    for node in facts.looked.nodes:
        if abs(node.clock_off) > MAX_CLOCK_OFF_S:
            yield _found(
                "cluster_clock",
                "warn",
                "a node's clock is wrong",
                "seconds",
                f"within {MAX_CLOCK_OFF_S:g} s of this node's",
                f"{node}: {node.clock_off:+.1f} s",
                "no time service runs there; times in logs and traces do not agree",
                "start chrony or systemd-timesyncd there",
            )
    if facts.unshared:
        yield _found(
            "cluster_folder",
            "bad",
            "nodes do not share this folder",
            "folders",
            "all nodes see the run folder",
            f"{', '.join(facts.unshared)}: not {facts.folder}",
            "it is on a disk of this node; every rank writes its part of a checkpoint into the run folder",
            "set observe.dir to a folder on NFS, Lustre or another file system that all nodes have, and look from there",
        )


def _variables(facts: ClusterFacts) -> Iterator[Finding]:
    nodes = facts.looked.nodes
    for name in sorted({name for node in nodes for name in node.variables}):
        values = {str(node): node.variables.get(name, "unset") for node in nodes}
        if len(set(values.values())) > 1:
            yield _found(
                "cluster_variables",
                "warn",
                "nodes have different variables",
                "variables",
                "the same on all nodes",
                f"{name}: {', '.join(f'{node} {value}' for node, value in values.items())}",
                "collectives may choose other protocols on each node, and wait for each other",
                f"set {name} for all nodes, or for none, before Ray is started",
            )
    for node in nodes:
        if node.networks and node.variables.get("NCCL_IB_DISABLE", "0") not in ("", "0"):
            yield _found(
                "cluster_ib_off",
                "warn",
                "InfiniBand is there and switched off",
                "variables",
                "NCCL_IB_DISABLE unset",
                f"{node} has {', '.join(node.networks)}, and NCCL_IB_DISABLE={node.variables['NCCL_IB_DISABLE']}",
                "NCCL then talks over TCP, many times more slowly",
                "unset NCCL_IB_DISABLE",
            )


def _links(facts: ClusterFacts) -> Iterator[Finding]:
    usual = median([link.bytes_per_s for link in facts.links]) if len(facts.links) > 2 else 0.0
    for link in facts.links:
        if link.bytes_per_s < SLOW_SHARE * usual:
            yield _found(
                "cluster_link",
                "warn",
                "a link is slow",
                "GB/s",
                f"at least {SLOW_SHARE:.0%} of the median, {usual / 1e9:.2f}",
                f"{link.one} to {link.other}: {link.bytes_per_s / 1e9:.2f}",
                "a cable or port at a lower rate, or other traffic; every step waits for the slowest link",
                "look at the port's rate (ethtool, ibstat), or leave the node out",
            )


def _found(
    rule: str, level: Level, title: str, unit: str, healthy: str, evidence: str, cause: str, remedy: str
) -> Finding:
    return Finding(rule, level, title, unit, healthy, evidence, cause, remedy, "safe")
