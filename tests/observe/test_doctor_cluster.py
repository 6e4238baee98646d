"""What the doctor finds in a Ray cluster, from what its nodes say."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trimtab.cluster.ray_links import ClusterFacts, MeasuredLink
from trimtab.cluster.ray_nodes import Looked, NodeFacts
from trimtab.observe.doctor.cluster import cluster_facts, cluster_findings

HERE = {"torch": "2.13.0", "ray": "2.60.0"}
NODES = tuple(
    NodeFacts(name, name, f"10.0.0.{number}", {"CPU": 8.0}, HERE, 8, 2**36, ()) for number, name in enumerate("abc")
)
LINKS = tuple(MeasuredLink(one, other, 12e9, "nccl") for one, other in ("ab", "bc", "ca"))
HEALTHY = ClusterFacts("10.0.0.0:6379", HERE, Looked(NODES), "/shared/runs", (), LINKS)


def with_node(**changes: object) -> ClusterFacts:
    return replace(HEALTHY, looked=Looked((*NODES[:2], replace(NODES[2], **changes))))


def test_a_healthy_cluster_has_no_findings_and_shows_its_links() -> None:
    assert cluster_findings(HEALTHY) == []
    shown = dict(cluster_facts(HEALTHY))
    assert shown["a - b"] == "12.00 GB/s each way in turn (nccl)"
    assert shown["c (10.0.0.2)"] == "8 CPUs, 64 GiB free"


@pytest.mark.parametrize(
    ("facts", "rule", "evidence"),
    [
        (
            with_node(versions={**HERE, "torch": "2.11.0"}),
            "cluster_versions",
            "c (10.0.0.2): torch 2.11.0, here 2.13.0",
        ),
        (with_node(clock_off=-3.0), "cluster_clock", "c (10.0.0.2): -3.0 s"),
        (with_node(variables={"NCCL_ALGO": "Ring"}), "cluster_variables", "NCCL_ALGO: a (10.0.0.0) unset"),
        (replace(HEALTHY, looked=Looked(NODES[:2], ("c",))), "cluster_silent", "c"),
        (replace(HEALTHY, unshared=("c",)), "cluster_folder", "c: not /shared/runs"),
        (replace(HEALTHY, links=(*LINKS[:2], replace(LINKS[2], bytes_per_s=1e9))), "cluster_link", "c to a: 1.00"),
    ],
)
def test_what_is_wrong_is_named(facts: ClusterFacts, rule: str, evidence: str) -> None:
    (found,) = cluster_findings(facts)
    assert found.rule == rule and found.evidence.startswith(evidence)


def test_infiniband_that_is_switched_off_is_told() -> None:
    nodes = tuple(replace(node, networks=("mlx5_0 InfiniBand",), variables={"NCCL_IB_DISABLE": "1"}) for node in NODES)
    found = cluster_findings(replace(HEALTHY, looked=Looked(nodes)))
    assert {each.rule for each in found} == {"cluster_ib_off"} and len(found) == 3
