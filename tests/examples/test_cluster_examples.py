"""Files for clusters that no test here can run: they can be read, they name what exists, and their commands are ours."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.examples.pages import ROOT
from tests.examples.test_site import problems

FOLDER = ROOT / "examples" / "cluster"
FILES = sorted(FOLDER.iterdir())


def commands(text: str) -> list[str]:
    """Every `trimtab ...` of a file."""
    lines = text.replace("\\\n", " ").splitlines()
    return [
        found[0] for line in lines if not line.startswith("#") for found in re.finditer(r"\btrimtab train .*", line)
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_commands_exist(path: Path) -> None:
    found = [line.replace('"$@"', "") for line in commands(path.read_text())]
    assert found and [problem for line in found for problem in problems(line)] == []


@pytest.mark.parametrize("path", [path for path in FILES if path.suffix == ".sh"], ids=lambda path: path.name)
def test_scripts_can_be_read(path: Path) -> None:
    assert subprocess.run(["bash", "-n", path], capture_output=True, text=True, check=False).stderr == ""


def test_settings_can_be_read() -> None:
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    groups = [job["spec"]["rayClusterSpec"]["headGroupSpec"], *job["spec"]["rayClusterSpec"]["workerGroupSpecs"]]
    for group in groups:
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert len({container["image"] for group in groups for container in group["template"]["spec"]["containers"]}) == 1
    assert yaml.safe_load((FOLDER / "skypilot.yaml").read_text())["num_nodes"] == 2


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied and all((ROOT / name).exists() for name in copied)
    assert set(copied) == sent
    assert re.search(r"FROM python:3\.(\d+)", lines[4]) and "ARG TORCH=" in "\n".join(lines)
