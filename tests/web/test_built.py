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


ON_CARD = ("ink", "mut", "faint", "ok", "warn", "bad", "accent", "eval", "metric", *(f"run{n}" for n in range(1, 9)))
"""Colours of text on a card, or of a label beside its line."""
UNDER_TEXT = ("rollout", "update", "eval")
"""Phases whose bars have their name in them."""


def luminance(colour: str) -> float:
    full = colour if len(colour) == 7 else "#" + "".join(c * 2 for c in colour[1:])
    parts = [int(full[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_what_canvases_write_can_be_read(scheme: int) -> None:
    blocks = re.findall(
        r":root(?:\[data-theme=\"dark\"\])? \{(.*?)\n\}", (SOURCES / "src" / "style.css").read_text(), re.DOTALL
    )
    colours = dict(re.findall(r"--(\w+): (#[0-9a-f]{3,6})", blocks[scheme]))
    low = {name: contrast(colours[name], colours["card"]) for name in ON_CARD}
    low |= {f"text on {name}": contrast(colours["onbar"], colours[name]) for name in UNDER_TEXT}
    assert {name: round(ratio, 2) for name, ratio in low.items() if ratio < 4.5} == {}
