"""Streams that are closed, or that nobody reads any more: a run outlives them."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.base.streams import hold_standard_streams, outlet
from trimtab.observe.console import Console

CONFIG = """
model: {{path: {model}}}
data: {{train: "task:arithmetic", options: {{size: 8}}}}
reward: [{{fn: rewards.py:talkative}}]
learn: {{steps: 3, prompts_per_step: 2, samples_per_prompt: 2, max_new_tokens: 4}}
run: {{device: cpu, threads: 1, reward_workers: 1}}
observe: {{dir: run, tensorboard: false}}
"""
REWARD = """
def talkative(completions, **_):
    print("scored " * 5000, flush=True)
    return [float(len(text)) for text in completions]
"""


@pytest.fixture
def here(tmp_path: Path, model_folder: Path) -> Path:
    (tmp_path / "run.yaml").write_text(CONFIG.format(model=model_folder))
    (tmp_path / "rewards.py").write_text(REWARD)
    return tmp_path


def runs_to_its_end(python: str, streams: str, here: Path) -> None:
    command = f"set -o pipefail; {python} -m trimtab train run.yaml {streams}"
    done = subprocess.run(["bash", "-c", command], cwd=here, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (here / "run/final/model.safetensors").exists()
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr


@pytest.mark.parametrize("streams", ["| head -1", "2>&1 | true", ">&-", "2>&-", "--json 2>&- | true", "2> >(true)"])
def test_a_run_goes_on_when_nobody_reads_what_it_shows(here: Path, warm_python: str, streams: str) -> None:
    runs_to_its_end(warm_python, streams, here)


@pytest.mark.slow
def test_a_run_goes_on_without_any_stream(here: Path) -> None:
    """From the interpreter's start: what is opened next has the numbers of the streams."""
    runs_to_its_end(sys.executable, "<&- >&- 2>&-", here)


class Closing(io.StringIO):
    """Takes so many writes, then no more."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def write(self, text: str) -> int:
        self.most -= 1
        if self.most < 0:
            raise OSError(5, "Input/output error")
        return super().write(text)


def test_a_terminal_that_goes_away_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    file = Closing(1)
    console = Console(3, file=file)
    for number in range(4):
        console.note(f"line {number}")
    console.finish({"steps": 3})
    assert file.getvalue() == "line 0\n"
    assert capsys.readouterr().err.count("output closed") == 1


@pytest.mark.parametrize("file", [None, object()])
def test_a_console_needs_no_terminal(file: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", file)
    with Console(1) as console:
        console.note("nothing comes of it")


def test_what_an_encoding_cannot_say_is_escaped() -> None:
    written = io.BytesIO()
    plain = io.TextIOWrapper(written, encoding="ascii")
    print("± 3", file=outlet(plain), flush=True)
    assert written.getvalue() == b"\\xb1 3\n"


def test_streams_that_are_open_stay_as_they_are() -> None:
    before = [Path(f"/proc/self/fd/{number}").resolve() for number in range(3)]
    hold_standard_streams()
    assert [Path(f"/proc/self/fd/{number}").resolve() for number in range(3)] == before
