"""What is installed is enough: commands run from anywhere without optional packages, and the version is said in one place."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

import trimtab
from trimtab.cli import app

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IMPORTED_AS = {
    "liger-kernel": "liger_kernel",
    "math-verify": "math_verify",
    "reasoning-gym": "reasoning_gym",
    "pytest-timeout": "pytest_timeout",
    "pytest-xdist": "xdist",
    "pre-commit": "pre_commit",
}
WITHOUT = """
import importlib.abc, importlib.util, sys

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in {names!r} else find(name, package)
from trimtab.cli import app
app()
"""


def optional_modules() -> list[str]:
    """What only the extras bring, by the names that are imported."""
    names = set()
    for lines in PROJECT["optional-dependencies"].values():
        names |= {match[0] for line in lines if (match := re.match(r"[A-Za-z0-9-]+", line)) and "trimtab[" not in line}
    return sorted(IMPORTED_AS.get(name, name) for name in names)


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    code = WITHOUT.format(names=set(optional_modules()))
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, timeout=240
    )


def test_the_extras_are_known() -> None:
    assert {"matplotlib", "datasets", "reasoning_gym", "pytest", "triton", "gguf"} <= set(optional_modules())


def test_the_demo_runs_without_optional_packages(tmp_path: Path) -> None:
    done = run(tmp_path, "demo", "--dir", "d", "--steps", "1", "--warm-steps", "1", "--difficulty", "2")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["curve"] is None
    told = " ".join(done.stdout.split())
    assert "cannot draw curve.png: drawing a learning curve needs matplotlib. Install it with: pip install" in told
    assert (tmp_path / "d" / "run" / "final" / "model.safetensors").exists()


def test_plan_and_doctor_run_without_optional_packages(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "model: {path: Qwen/Qwen2.5-0.5B-Instruct}\ndata: {train: 'task:arithmetic'}\nreward: [{fn: task}]\n"
    )
    planned = run(tmp_path, "plan", "c.yaml", "--device", "h200", "--json")
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout.splitlines()[-1])["fits"]
    told = json.loads(run(tmp_path, "doctor", "--json").stdout.splitlines()[-1])
    assert told["machine"]["trimtab"] == trimtab.__version__


def test_the_version_is_said_in_one_place() -> None:
    assert "version" not in PROJECT
    assert PROJECT["dynamic"] == ["version"]
    assert CliRunner().invoke(app, ["--version"]).stdout.strip() == f"trimtab {trimtab.__version__}"
    assert re.search(rf"^## ({re.escape(trimtab.__version__)}|Unreleased)$", (ROOT / "CHANGELOG.md").read_text(), re.M)


@pytest.mark.slow
def test_the_wheel_holds_the_whole_package(tmp_path: Path) -> None:
    """Needs hatchling from the package index."""
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, timeout=600)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"trimtab-{trimtab.__version__}-py3-none-any.whl"
    source = ROOT / "src"
    files = {
        str(file.relative_to(source))
        for file in source.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == files
