"""Checks, before anything expensive starts, that the library of an engine is installed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from trimtab.base.errors import ConfigError, Problem
from trimtab.config.run import Run
from trimtab.rollout.external.kinds import KINDS

FIND_TIMEOUT_S = 120.0
FIND_SCRIPT = """
import importlib.metadata, importlib.util, json, sys
module, *names = sys.argv[1:]
found = [d.version for d in map(lambda n: next(iter(importlib.metadata.distributions(name=n)), None), names) if d]
print(json.dumps({"there": importlib.util.find_spec(module) is not None, "version": (found or [None])[0]}))
"""


def interpreter(python: str | None) -> str:
    """What `run.rollout.python` names: a file, or a program on the path."""
    if python is None:
        return sys.executable
    return str(Path(os.path.expanduser(python)).absolute()) if os.sep in python else shutil.which(python) or python


def engines_here() -> tuple[str, ...]:
    """The libraries that this environment has, in versions that were tested."""
    found = []
    for kind in KINDS.values():
        versions = [d.version for name in kind.packages for d in importlib.metadata.distributions(name=name)]
        if versions and importlib.util.find_spec(kind.name) and kind.serves(versions[0]):
            found.append(kind.name)
    return tuple(found)


def refuse_without_engine(run: Run, device: torch.device) -> None:
    """Where `run` asks for another library's engine and there is none, none that was tested, or none for the device."""
    kind = KINDS.get(run.engine)
    if kind is None:
        return
    if kind.needs_gpu and device.type != "cuda":
        fix = "Write run.engine: native, or vllm, which both run on a CPU; or run where there is a CUDA device."
        raise ConfigError([Problem("run.engine", f"{kind.title} needs a CUDA device, but this run has none", fix)])
    here = max(1, torch.cuda.device_count())
    if device.type == "cuda" and run.cut > here:
        there = "one CUDA device" if here == 1 else f"{here} CUDA devices"
        what = f"is {run.cut}, but this machine has {there}"
        raise ConfigError([Problem("run.rollout.tensor_parallel", what, f"Write at most {here}.")])
    chosen = interpreter(run.rollout.python)
    key = "run.engine" if run.rollout.python is None else "run.rollout.python"
    if not Path(chosen).is_file():
        fix = f"Name the python of an environment with {kind.title}, such as ~/{kind.name}/bin/python."
        raise ConfigError([Problem(key, f"there is no interpreter {chosen!r}", fix)])
    try:
        command = [chosen, "-c", FIND_SCRIPT, kind.name, *kind.packages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=FIND_TIMEOUT_S, check=False)
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, IndexError, json.JSONDecodeError):
        found = None
    if found is None:
        raise ConfigError([Problem(key, f"{chosen} does not run Python", "Name another interpreter.")])
    if not found["there"]:
        raise ConfigError([Problem(key, f"{kind.title} is not installed for {chosen}", kind.install)])
    if found["version"] is not None and not kind.serves(found["version"]):
        what = f"{kind.title} {found['version']} is not a version that Trimtab was tested with"
        fix = f"Install a version from {kind.oldest} up to, but not including, {kind.newest}; or write run.engine: native."
        raise ConfigError([Problem(key, what, fix)])
