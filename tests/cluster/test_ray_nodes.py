"""What is known of a Ray cluster without one: addresses, unequal nodes, the machine that a plan sees, the order of ranks."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from trimtab.base.errors import ConfigError, TrainingError
from trimtab.cluster.ray_host import SHARED, RankHost, Where, interface_of
from trimtab.cluster.ray_look import look
from trimtab.cluster.ray_nodes import NodeFacts, connect, refuse_unequal_nodes
from trimtab.config.run import Run
from trimtab.run.ray_hosts import RayHosts, address_of, open_hosts, paths_of

GIB = 2**30


def node(
    name: str = "a", address: str = "10.0.0.1", gpus: int = 0, cpus: int = 4, kind: str = "NVIDIA H100"
) -> NodeFacts:
    told = look()
    card = ("0", kind, "81559", "81000", "9.0")
    found = {"CPU": float(cpus)} | ({"GPU": float(gpus), "accelerator_type:H100": 1.0} if gpus else {})
    return NodeFacts(name, name, address, found, told["versions"], 8, 64 * GIB, (card,) * gpus)


def refused(address: str) -> str:
    with pytest.raises(ConfigError) as caught, connect(address):
        pass
    return str(caught.value)


def test_no_ray_at_the_address_is_told_at_once() -> None:
    said = refused("127.0.0.1:9")
    assert said.startswith("run.cluster: no Ray cluster answers at 127.0.0.1:9 ([Errno 111] Connection refused)")
    assert said.endswith("or write run.cluster: local.")


@pytest.mark.parametrize("address", ["ray://10.0.0.1:10001", "http://10.0.0.1:8265", "somewhere"])
def test_other_addresses_are_explained(address: str) -> None:
    assert address in (said := refused(address))
    assert ("ray job submit" in said) == ("://" in address)


def test_auto_takes_the_address_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert address_of(Run()) == "10.0.0.1:6379"
    assert address_of(Run(cluster="local")) is None
    assert address_of(Run(cluster="10.0.0.2:6379")) == "10.0.0.2:6379"
    monkeypatch.setattr("trimtab.run.ray_hosts.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"RAY_ADDRESS is set, but Ray is not installed here\. pip install 'trimtab\[ray\]'"
    ):
        address_of(Run())
    monkeypatch.delenv("RAY_ADDRESS")
    assert address_of(Run()) is None
    with open_hosts(Run()) as hosts:
        assert hosts is None


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("torch", "2.11.0", "has torch 2.11.0"),
        ("transformers", "none", "has no transformers"),
        ("Trimtab's source", "none", "has no Trimtab"),
    ],
)
def test_a_node_with_other_software_is_named(name: str, value: str, said: str) -> None:
    refuse_unequal_nodes([node(), node("b")])
    other = replace(node("b", "10.0.0.2"), versions=look()["versions"] | {name: value})
    with pytest.raises(TrainingError, match=rf"node b \(10\.0\.0\.2\) {said}, and this process has .* on every node"):
        refuse_unequal_nodes([node(), other])


def test_the_source_of_this_package_has_a_mark() -> None:
    assert len(look()["versions"]["Trimtab's source"]) == 12


def test_ranks_are_numbered_by_host_and_device() -> None:
    places = [Where("n", "h", address, (gpu,)) for address in ("10.0.0.10", "10.0.0.9") for gpu in ("10", "2")]
    found = sorted(places, key=lambda where: where.order)
    assert [(where.address, where.gpus) for where in found] == [
        ("10.0.0.9", ("2",)),
        ("10.0.0.9", ("10",)),
        ("10.0.0.10", ("2",)),
        ("10.0.0.10", ("10",)),
    ]


def test_a_plan_sees_all_gpus() -> None:
    hosts = RayHosts("x:1", [node(gpus=8), node("b", "10.0.0.2", gpus=8)], "GPU")
    machine, notes = hosts.machine(hosts.asked(Run()))
    assert (machine.devices, machine.per_host, machine.hosts, machine.cpu) == (16, 8, 2, False)
    assert machine.device.name == "NVIDIA H100" and not notes
    with pytest.raises(ConfigError, match="is 32, but the Ray cluster has 16 GPUs"):
        hosts.machine(hosts.asked(Run(devices=32)))


def test_on_cpus_there_is_a_rank_a_node_and_their_cores_add_up() -> None:
    hosts = RayHosts("x:1", [node(), node("b"), node("head", cpus=0)], "CPU")
    asked = hosts.asked(Run())
    machine, _ = hosts.machine(asked)
    assert (asked.devices, asked.cluster, machine.cores, machine.host_memory) == (2, "x:1", 16, 128 * GIB)


def test_after_a_loss_a_run_asks_for_what_is_left() -> None:
    hosts = RayHosts("x:1", [node(cpus=3)], "CPU", most=3)
    asked = hosts.asked(Run(devices=4, shard="optimizer", shard_devices=2))
    assert (asked.devices, asked.shard, asked.shard_devices) == (3, "optimizer", "auto")
    alone = RayHosts("x:1", [node(cpus=1)], "CPU", most=1).asked(Run(devices=4, shard="optimizer"))
    assert (alone.devices, alone.shard) == (1, "auto")


def test_a_node_that_does_not_share_the_run_folder_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.cluster.ray_host.SHARED_S", 0.2)
    mark = tmp_path / "mark"
    host = RankHost.__new__(RankHost)
    late = threading.Timer(0.1, lambda: mark.write_text("mark"))
    late.start()
    assert host.missing({"model.path": str(tmp_path), "other": str(tmp_path / "no")}, str(mark)) == ["other"]
    late.join()
    mark.write_text("another machine's")
    assert host.missing({}, str(mark)) == [SHARED]


def test_only_paths_that_are_here_must_be_there(tmp_path: Path) -> None:
    class Model:
        path = str(tmp_path)

    class Config:
        model, learn = Model, None

    assert paths_of(Config, ["some/model-on-the-hub"], None) == {"model.path": str(tmp_path)}
    assert paths_of(Config, [str(tmp_path)], tmp_path) == {
        "model.path": str(tmp_path),
        "the newest checkpoint": str(tmp_path),
        f"reward model {tmp_path}": str(tmp_path),
    }


def test_gloo_is_bound_to_the_network_of_ray() -> None:
    (loopback,) = (
        name for name, found in psutil.net_if_addrs().items() if any(a.address == "127.0.0.1" for a in found)
    )
    assert interface_of("127.0.0.1") == {"GLOO_SOCKET_IFNAME": loopback}
    assert interface_of("203.0.113.7") == {} and os.environ.get("GLOO_SOCKET_IFNAME") is None
