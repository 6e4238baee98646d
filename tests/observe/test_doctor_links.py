"""`trimtab doctor` on a machine with several GPUs: what they talk over, and what is wrong with it."""

from __future__ import annotations

import io
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.observe.test_doctor_machine import DRIVER, GPU, WITH_GPU
from trimtab.observe.doctor.checks import machine_findings
from trimtab.observe.doctor.links import driver_links
from trimtab.observe.doctor.machine import MachineReport
from trimtab.observe.doctor.report import machine_report, print_report

LINKS = {"nccl": "2.27.3", "no_peer_access": []}


class NVMLError(Exception):
    pass


def nvml(gpus: int, nvlinks: int, level: int | None) -> Any:
    """NVIDIA's library on a machine with so many GPUs."""

    def state(handle: int, link: int) -> int:
        if link >= nvlinks:
            raise NVMLError("not supported")
        return 1

    def ancestor(one: int, other: int) -> int:
        assert one != other
        if level is None:
            raise NVMLError("unknown")
        return level

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_FEATURE_ENABLED=1,
        nvmlDeviceGetCount=lambda: gpus,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetNvLinkState=state,
        nvmlDeviceGetTopologyCommonAncestor=ancestor,
    )


def several(names: tuple[str, ...] = ("NVIDIA H200", "NVIDIA H200"), **torch: Any) -> MachineReport:
    gpus = [GPU | {"name": name} for name in names]
    driver = replace(DRIVER, gpus=[DRIVER.gpus[0]] * len(gpus), links=driver_links(nvml(len(gpus), 18, 50)))
    return replace(WITH_GPU, driver=driver, torch=WITH_GPU.torch | {"gpus": gpus} | LINKS | torch)  # type: ignore[operator]


def rules(machine: MachineReport) -> set[str]:
    return {finding.rule for finding in machine_findings(machine)}


@pytest.mark.parametrize(
    ("nvlinks", "level", "expected"),
    [
        (18, 50, {"nvlinks": [18, 18, 18], "path": "between processors"}),
        (0, 30, {"nvlinks": [0, 0, 0], "path": "through the processor's PCIe bridge"}),
        (0, None, {"nvlinks": [0, 0, 0], "path": None}),
    ],
)
def test_what_the_driver_says_of_three_gpus(nvlinks: int, level: int | None, expected: dict[str, Any]) -> None:
    assert driver_links(nvml(3, nvlinks, level)) == expected


def test_one_gpu_has_nobody_to_talk_to() -> None:
    assert driver_links(nvml(1, 18, None)) == {}


def test_equal_gpus_with_peer_access_are_healthy_and_told() -> None:
    machine = several()
    assert rules(machine) == set()
    out = io.StringIO()
    print_report(out, machine_report(machine, []))
    assert "NVLink (18 links each), NCCL 2.27.3" in out.getvalue()


@pytest.mark.parametrize(
    ("machine", "rule"),
    [
        (several(("NVIDIA H200", "NVIDIA L4")), "gpus_differ"),
        (several(no_peer_access=[[0, 1]]), "no_peer_access"),
        (several(nccl=None), "no_nccl"),
    ],
    ids=["kinds", "peers", "nccl"],
)
def test_what_slows_several_gpus_down_is_found(machine: MachineReport, rule: str) -> None:
    assert rules(machine) == {rule}
