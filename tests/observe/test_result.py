"""What training returns, and any run folder, from Python: numbers, samples, findings, and HTML that is only text and pictures."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import trimtab
from tests.observe.planted import DISTINCT, plant
from trimtab.base.errors import ConfigError, DataError
from trimtab.cli import app
from trimtab.observe.result import Result
from trimtab.observe.svg import curve_svg, phases_svg, thinned

TAGS = {"div", "table", "tr", "td", "img"}
STYLES = re.compile(r"^[-a-z]+:[^;<>\"']+(;[-a-z]+:[^;<>\"']+)*;?$")


class OnlyText(HTMLParser):
    """Collects text and pictures; refuses whatever else a page could hold."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.pictures, self.open = "", list[str](), list[str]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS
        assert {name for name, _ in attrs} <= {"style", "src", "width", "height", "alt"}
        given = dict(attrs)
        assert "style" not in given or STYLES.match(given["style"] or "")
        if tag == "img":
            head, data = (given["src"] or "").split(",", 1)
            assert head == "data:image/svg+xml;base64"
            self.pictures.append(base64.b64decode(data).decode())
        else:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("name", DISTINCT)
def test_every_run_is_shown_as_text_and_pictures(name: str, tmp_path: Path) -> None:
    html = trimtab.Run(plant(tmp_path / "run", name))._repr_html_()
    page = OnlyText()
    page.feed(html)
    assert not page.open and page.text.startswith("Trimtab · ")
    for picture in page.pictures:
        tree = ET.fromstring(picture)
        assert {element.tag.rpartition("}")[2] for element in tree.iter()} <= {
            "svg", "line", "polyline", "circle", "text", "rect",
        }  # fmt: skip
    assert len(page.pictures) == (2 if name == "starting" else 3)


def test_a_result_is_a_dictionary_and_more(tmp_path: Path) -> None:
    folder = plant(tmp_path / "run", "healthy")
    result = Result({"run_dir": str(folder), "steps": 150})
    assert result == {"run_dir": str(folder), "steps": 150} and json.loads(json.dumps(result)) == result
    metrics = result.metrics()
    assert len({len(values) for values in metrics.values()}) == 1
    assert metrics["step"].tolist() == list(range(151))
    assert np.isnan(metrics["reward/mean"][0]) and metrics["reward/mean"][-1] > 0.7
    assert result.samples()[0]["step"] == trimtab.Run(folder).sample_steps()[-1]
    assert "<img" in (result._repr_html_() or "")
    (folder / "config.yaml").unlink()
    assert result._repr_html_() is None


def test_metrics_make_a_table_of_pandas(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame(trimtab.Run(plant(tmp_path / "run", "sft")).metrics()).set_index("step")
    assert table["sft/loss"].dropna().iloc[-1] < table["sft/loss"].dropna().iloc[0]


def test_samples_of_training_and_of_evaluation(tmp_path: Path) -> None:
    run = trimtab.Run(plant(tmp_path / "run", "healthy"))
    step = run.sample_steps()[0]
    assert {row["step"] for row in run.samples(step)} == {step}
    at = run.sample_steps("eval")[0]
    assert run.samples(at, "eval") and run.samples(kind="eval")
    with pytest.raises(
        DataError, match=r"has no samples of step 77777\. There are some of .*; see observe\.samples_every"
    ):
        run.samples(77777)
    with pytest.raises(ConfigError, match="kind: got 'test'"):
        run.samples(step, "test")  # type: ignore[arg-type]
    bare = trimtab.Run(plant(tmp_path / "bare", "starting"))
    assert bare.samples() == [] and bare.sample_steps() == []


def test_the_doctor_prints_what_the_command_prints(tmp_path: Path) -> None:
    run = plant(tmp_path / "run", "rollout_kv")
    found = trimtab.Run(run).doctor()
    printed = CliRunner().invoke(app, ["doctor", str(run)]).stdout
    assert str(found) == repr(found) and str(found).split() == printed.split()
    assert [finding.rule for finding in found]


def test_a_folder_without_a_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no run: it has no config\.yaml"):
        trimtab.Run(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        trimtab.Run(tmp_path / "none")


def test_reading_a_run_needs_no_torch(tmp_path: Path) -> None:
    folder = plant(tmp_path / "run", "healthy")
    code = (
        f"import sys, trimtab; run = trimtab.Run({str(folder)!r}); run._repr_html_(); run.doctor(); run.metrics(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_pictures_keep_spikes_and_stay_small() -> None:
    steps = np.arange(10_000, dtype=float)
    values = np.zeros(10_000)
    values[4321] = 5.0
    xs, ys = thinned(steps, values)
    assert ys.max() == 5.0 and len(xs) <= 480 and (np.diff(xs) > 0).all()
    nothing = (np.array([]), np.array([]))
    assert len(curve_svg((steps, values), nothing, 300, 100)) < 20_000
    assert "<polyline" not in curve_svg(nothing, nothing, 300, 100)
    assert "<circle" in curve_svg((np.array([1.0]), np.array([2.0])), nothing, 300, 100)
    bar = phases_svg({"rollout": 3.0, "update": 1.0, "<b>": 4.0, "eval": 0.0}, 400, 20)
    assert bar.count("<rect") == 3 and "<b>" not in bar and "rollout 38%" in bar


def test_a_report_is_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("app.js", "app.css"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr("trimtab.observe.web.report.ASSETS", tmp_path)
    run = trimtab.Run(plant(tmp_path / "run", "one_step"))
    assert run.report() == run.folder / "report.html"
    assert run.report(tmp_path / "mine.html").read_bytes().startswith(b"<!doctype html>")
