"""The built script and style: what the sources build, and no address in them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from trimtab.observe.web.report import ASSETS as WEB

SOURCES = Path(__file__).resolve().parents[2] / "web"
SVG_NAMESPACE = "http://www.w3.org/2000/svg"
"""An element of SVG cannot be made without it. Nothing is fetched from there."""


@pytest.mark.parametrize("name", ["app.js", "app.css"])
def test_no_outside_address_and_no_closing_tag(name: str) -> None:
    text = (WEB / name).read_text()
    assert re.findall(r"https?://.{0,40}", text.replace(SVG_NAMESPACE, "")) == []
    assert not re.search(r"</(script|style)", text, re.IGNORECASE)
    assert text.isascii() or name == "app.css"


def test_script_runs_without_eval() -> None:
    assert not re.search(r"\beval\(|new Function\(", (WEB / "app.js").read_text())


def test_licences_of_what_is_bundled_go_with_it() -> None:
    text = (WEB / "THIRD_PARTY_LICENSES").read_text()
    assert all(name in text for name in ("preact", "@preact/signals", "uplot"))


def test_sources_build_the_same_bytes(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (SOURCES / "node_modules").is_dir():
        pytest.skip("node or web/node_modules is missing: run npm ci in web/")
    subprocess.run([node, "build.mjs", str(tmp_path)], cwd=SOURCES, check=True, capture_output=True, timeout=120)
    for name in ("app.js", "app.css", "THIRD_PARTY_LICENSES"):
        assert (tmp_path / name).read_bytes() == (WEB / name).read_bytes(), (
            f"{name} is not what web/ builds: run make web"
        )
