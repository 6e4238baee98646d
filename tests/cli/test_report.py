"""`trimtab report`: one file, no way out of it, no text of a run as code, and clear words where it cannot be written."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.observe.planted import plant
from tests.observe.planted_parts import HOSTILE
from trimtab.cli import app
from trimtab.observe.web.report import write_report

SCRIPT, STYLE = "document.title = 'ready';\n", "body { margin: 0 }\n"


@pytest.fixture(autouse=True)
def placeholders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script and a style of two lines: what is in the built ones is not what these tests are about."""
    folder = tmp_path / "assets"
    folder.mkdir()
    (folder / "app.js").write_text(SCRIPT)
    (folder / "app.css").write_text(STYLE)
    monkeypatch.setattr("trimtab.observe.web.report.ASSETS", folder)
    return folder


def report(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


class Page(HTMLParser):
    """Elements and attributes of a page, and the text of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.shown = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] in ("script", "style"):
            self.scripts.append(data)
        else:
            self.shown += data


def document(text: str) -> dict[str, Any]:
    packed = re.search(r'<script type="application/octet-stream" id="data">([A-Za-z0-9+/=]*)</script>', text)
    assert packed is not None
    found: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(packed[1])))
    return found


def test_a_report_is_one_file_that_can_ask_nobody_anything(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", "rollout_tail")
    done = report(run, "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    page = run / "report.html"
    assert told["path"] == str(page) and told["bytes"] == page.stat().st_size and told["runs"][0]["level"] == "warn"
    text = page.read_text()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None and policy[1].startswith("default-src 'none'; script-src 'sha256-")
    for inline in (SCRIPT, STYLE):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'" in policy[1]
    assert "unsafe" not in policy[1] and not re.search(r"https?://|src=|@import", text.replace("default-src", ""))
    assert "Rollout bounds the speed, with 65 % of the time: it waits for its longest responses." in text
    assert "<svg" in text and "polyline" in text and "style=" not in text
    found = document(text)
    assert found["version"] == 1 and found["mode"] == "report" and len(found["runs"]) == 1 and found["compare"] is None
    assert len(found["runs"][0]["plan"]["changes"]) == 10


def test_several_runs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [plant(tmp_path / name, name) for name in ("one_step", "starting", "sft")]
    done = report(*runs, runs[0])
    assert done.exit_code == 0 and "trimtab-report.html" in done.stdout
    found = document((tmp_path / "trimtab-report.html").read_text())
    assert [run["id"] for run in found["runs"]] == found["compare"]["runs"] and len(found["runs"]) == 3


def test_hostile_text_is_never_code(tmp_path: Path) -> None:
    written = write_report([plant(tmp_path / "run", "hostile")], changes=False)
    text = written.path.read_text()
    page = Page(text)
    tags = {tag for tag, _ in page.elements}
    assert tags <= {"html", "head", "meta", "link", "title", "style", "body", "div", "h1", "p", "code", "svg", "line", "text",
                    "polyline", "circle", "script"}  # fmt: skip
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert len([tag for tag, _ in page.elements if tag == "script"]) == 2
    for bad in HOSTILE:
        assert bad not in text
    rows = document(text)["runs"][0]["samples"]["rows"]["train:1"]
    assert {row["completion"] for row in rows} & set(HOSTILE), "and yet it is all there"


def test_a_run_with_a_hostile_name_is_escaped(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", "one_step")
    facts = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(
        json.dumps(facts | {"name": HOSTILE[0], "state": "failed", "error": {"text": HOSTILE[1]}})
    )
    page = Page(write_report([run], changes=False).path.read_text())
    assert HOSTILE[0] in page.shown and HOSTILE[1] in page.shown
    assert len([tag for tag, _ in page.elements if tag in ("script", "img")]) == 2


@pytest.mark.parametrize("name", ["old_version", "damaged", "starting", "failed", "resumed", "reward_model"])
def test_every_folder_has_a_report(name: str, tmp_path: Path) -> None:
    done = report(plant(tmp_path / "run", name), "--private")
    assert done.exit_code == 0, done.stderr
    assert str(tmp_path) not in (tmp_path / "run" / "report.html").read_text()


def test_a_report_is_replaced_and_other_files_are_not(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", "one_step")
    out = tmp_path / "out.html"
    assert report(run, "--out", out).exit_code == 0 and report(run, "--out", out).exit_code == 0
    done = report(run, "--out", run / "config.yaml")
    assert done.exit_code == 2 and "exists and is no report of Trimtab" in done.stderr
    assert "learn:" in (run / "config.yaml").read_text()


def test_wrong_use_is_explained(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", "healthy")
    for arguments, words in (
        ([tmp_path / "none"], "does not exist"),
        ([tmp_path], f"holds no run: it has no config.yaml. Did you mean {run}?"),
        (
            [run / "checkpoints" / "step-100"],
            f"is a checkpoint, not a run. Give the run's folder: trimtab report {run}",
        ),
        ([run, "--out", tmp_path], "is a folder. Give the name of a file"),
        ([run, "--out", tmp_path / "no" / "x.html"], "the folder"),
        ([tmp_path / f"r{n}" for n in range(9)], "9 runs were given; a report compares at most 8"),
    ):
        done = report(*arguments)
        assert done.exit_code == 2 and words in done.stderr, done.stderr
        told = json.loads(report(*arguments, "--json").stdout.splitlines()[-1])
        assert words in told["error"]


def test_an_output_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = plant(tmp_path / "run", "one_step")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("trimtab.observe.web.report.write_file", refuse)
    done = report(run)
    assert done.exit_code == 2 and "report.html cannot be written: Permission denied" in done.stderr


def test_a_copy_that_was_not_built_says_so(tmp_path: Path, placeholders: Path) -> None:
    run = plant(tmp_path / "run", "one_step")
    (placeholders / "app.js").unlink()
    done = report(run)
    assert done.exit_code == 2 and "was not built. Build it with: make web" in done.stderr
    (placeholders / "app.js").write_text("x = '</script>'")
    assert "cannot stand inside a page" in report(run).stderr


@pytest.mark.slow
def test_ten_thousand_steps_stay_below_fifteen_megabytes(tmp_path: Path) -> None:
    assert write_report([plant(tmp_path / "run", "ten_thousand")]).size < 15_000_000
