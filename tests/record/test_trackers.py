"""W&B and trackio: the same names, the config, and the report at the end."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from trimtab.base.errors import ConfigError
from trimtab.config.schema import Observe
from trimtab.record.sinks import Sinks

CONFIG = "learn:\n  lr: 0.5\nobserve: {}\n"


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[Any, ...]] = []
        self.finished = False

    def define_metric(self, name: str, step_metric: str) -> None:
        pass

    def log(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.logged.append((metrics, step))

    def finish(self) -> None:
        self.finished = True


class FakeModule(types.SimpleNamespace):
    """What both packages have, as far as it is used."""

    def __init__(self) -> None:
        self.inits: list[dict[str, Any]] = []
        self.run = FakeRun()

    def init(self, **settings: Any) -> FakeRun:
        self.inits.append(settings)
        return self.run

    def Html(self, data: str, inject: bool = True) -> tuple[str, str, bool]:
        return "html", data, inject


def written(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text(CONFIG)
    (folder / "report.html").write_text("<p>report</p>")
    return folder


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_config_names_and_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    fake, folder = FakeModule(), written(tmp_path / "run-1")
    monkeypatch.setitem(sys.modules, name, fake)
    sinks = Sinks(folder, Observe(tensorboard=False, **{name: "project"}), None)
    assert sinks.wants_report
    sinks.write(3, {"reward/mean": 0.5, "eval/pass@1": float("nan")})
    sinks.attach(folder / "report.html")
    sinks.close()
    (init,) = fake.inits
    assert (init["project"], init["name"], init["config"]) == (
        "project",
        "run-1",
        {"learn": {"lr": 0.5}, "observe": {}},
    )
    report = ("html", str(folder / "report.html"), False)
    expected = {
        "wandb": [({"step": 3, "reward/mean": 0.5}, None), ({"step": 3, "report": report}, None)],
        "trackio": [({"reward/mean": 0.5}, 3), ({"report": report}, 3)],
    }
    assert fake.run.logged == expected[name]
    assert fake.run.finished


def test_without_trackers_no_report_is_wanted(tmp_path: Path) -> None:
    sinks = Sinks(tmp_path, Observe(tensorboard=False), None)
    assert not sinks.wants_report
    sinks.close()


def test_trackio_missing_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(ConfigError, match=r"observe\.trackio.*trimtab\[trackio\]"):
        Sinks(tmp_path, Observe(trackio="project", tensorboard=False), None)


def test_trackio_takes_what_it_is_given() -> None:
    trackio = pytest.importorskip("trackio", reason="needs trimtab[trackio]")
    taken = set(inspect.signature(trackio.init).parameters)
    assert {"project", "name", "config", "resume", "embed", "auto_log_gpu", "auto_log_cpu"} <= taken
    assert "inject" in inspect.signature(trackio.Html).parameters


USES_TRACKIO = """
import sys
from pathlib import Path
from trimtab.config.schema import Observe
from trimtab.record.sinks import Sinks
folder = Path(sys.argv[1])
sinks = Sinks(folder, Observe(tensorboard=False, trackio="proj"), None)
sinks.write(1, {"reward/mean": 0.25, "eval/pass@1": 0.5})
sinks.write(2, {"reward/mean": 0.75})
sinks.close()
sinks = Sinks(folder, Observe(tensorboard=False, trackio="proj"), 2)
sinks.write(3, {"reward/mean": 1.0})
sinks.attach(folder / "report.html")
sinks.close()
from trackio.sqlite_storage import SQLiteStorage
logs = SQLiteStorage.get_logs("proj", "run-1")
assert SQLiteStorage.get_runs("proj") == ["run-1"], SQLiteStorage.get_runs("proj")
assert [(row["step"], row["reward/mean"]) for row in logs if "reward/mean" in row] == [(1, 0.25), (2, 0.75), (3, 1.0)], logs
assert logs[0]["eval/pass@1"] == 0.5
assert [row["step"] for row in logs if "report" in row] == [3], logs
assert SQLiteStorage.get_run_config("proj", "run-1")["learn"] == {"lr": 0.5}
"""


def test_a_real_trackio_has_it_all(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="needs trimtab[trackio]")
    folder = written(tmp_path / "run-1")
    environment = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", USES_TRACKIO, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "trackio").rglob("*.html"))
