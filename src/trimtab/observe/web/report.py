"""`trimtab report`: runs as one HTML file that needs nothing else. It can be mailed, kept, and opened from a disk.

Guarantees: no request is possible (CSP, and no address in it), no text of a run is ever code, and without scripts the verdict and
the main chart are there. The file is replaced whole, or not at all.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from trimtab.base.errors import DataError
from trimtab.base.files import write_file
from trimtab.base.package import PACKAGE
from trimtab.observe.look import RunLook, look_at
from trimtab.observe.web.data import report_document
from trimtab.observe.web.picture import main_chart

ASSETS = PACKAGE / "observe" / "web"
"""Where app.js and app.css are (`make web`)."""
REPORT_FILE, SEVERAL_FILE = "report.html", "trimtab-report.html"
MOST_RUNS = 8
BEGINS = b"<!doctype html>\n<!-- Trimtab report -->"
"""How a report begins: a file that begins otherwise is not replaced."""


@dataclass(frozen=True)
class Written:
    path: Path
    size: int
    runs: tuple[dict[str, Any], ...]

    def as_json(self) -> dict[str, Any]:
        return {"path": str(self.path), "bytes": self.size, "runs": list(self.runs)}


def write_report(
    folders: Sequence[Path], out: Path | None = None, private: bool = False, changes: bool = True
) -> Written:
    """The report of one run, or of several that are compared. Without `out`: into the run's folder; of several, here.
    `changes`: with what single changes of the settings would take, which costs seconds."""
    runs = list({folder.absolute(): folder for folder in map(Path, folders)}.values())
    if len(runs) > MOST_RUNS:
        raise DataError(f"RUN: {len(runs)} runs were given; a report compares at most {MOST_RUNS}")
    looks = [look_at(folder) for folder in runs]
    if not looks:
        raise DataError("RUN: no run was given")
    path = out if out is not None else runs[0] / REPORT_FILE if len(runs) == 1 else Path(SEVERAL_FILE)
    _refuse_other_file(path)
    document = report_document(looks, private, changes=changes)
    page = report_page(document, looks[0])
    try:
        write_file(path, [page])
    except OSError as error:
        raise DataError(f"--out: {path} cannot be written: {error.strerror or error}") from error
    told = tuple({"id": run["id"], "name": run["name"], "level": run["level"]} for run in document["runs"])
    return Written(path, len(page), told)


def _refuse_other_file(path: Path) -> None:
    if path.is_dir():
        raise DataError(f"--out: {path} is a folder. Give the name of a file, such as {path / REPORT_FILE}")
    if not path.parent.is_dir():
        raise DataError(f"--out: the folder {path.parent} does not exist")
    try:
        with path.open("rb") as file:
            found = file.read(len(BEGINS))
    except FileNotFoundError:
        return
    except OSError as error:
        raise DataError(f"--out: {path} cannot be written: {error.strerror}") from error
    if found and found != BEGINS:
        raise DataError(f"--out: {path} exists and is no report of Trimtab. Give another name, or move it away")


def report_page(document: dict[str, Any], look: RunLook) -> bytes:
    """The page: shell, style, script, data, and the verdict and main chart of the first run as plain HTML."""
    script, style = _asset("app.js"), _asset("app.css")
    text = json.dumps(document, allow_nan=False, separators=(",", ":"))
    data = base64.b64encode(gzip.compress(text.encode("ascii"), 6, mtime=0)).decode("ascii")
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    runs = document["runs"]
    title = escape(" · ".join(str(run["name"]) for run in runs))
    parts = [
        BEGINS.decode(),
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        '<meta name="referrer" content="no-referrer">',
        '<link rel="icon" href="data:,">',
        f"<title>{title} · Trimtab</title>",
        f"<style>{style}</style>",
        "</head>",
        "<body>",
        f'<div id="app">{_static(document, look)}</div>',
        f'<script type="application/octet-stream" id="data">{data}</script>',
        f"<script>{script}</script>",
        "</body>",
        "</html>",
        "",
    ]
    return "\n".join(parts).encode("utf-8", "backslashreplace")


def _static(document: dict[str, Any], look: RunLook) -> str:
    """What is there without scripts, and in the preview of a mail."""
    found = []
    for at, run in enumerate(document["runs"]):
        facts, state = run["facts"], run["state"]
        known = [facts["task"], _size(facts["parameters"]), facts["algorithm"], facts["batch"], facts["device"]]
        found.append(f"<h1>{escape(str(run['name']))}</h1>")
        found.append(f"<p>{escape(' · '.join(str(fact) for fact in known if fact))}</p>")
        found.append(f"<p>{escape(str(state['text']))}</p>")
        for part in run["verdict"]["parts"]:
            label = "Next: " if part["id"] == "next" else ""
            more = f" <code>{escape(part['key'])}</code>" if part.get("key") else ""
            gain = f" ({escape(part['gain'])})" if part.get("gain") else ""
            found.append(f"<p>{label}{escape(part['text'])}{more}{gain}</p>")
        if at == 0:
            found.append(main_chart(look))
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(document["written"]))
    found.append(f"<p>Written {written}. The charts, samples and tables of this report need JavaScript.</p>")
    return "\n".join(found)


def _size(parameters: float | None) -> str | None:
    if not parameters:
        return None
    return f"{parameters / 1e9:.2f}B parameters" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M parameters"


def _asset(name: str) -> str:
    """The built script or style, fit to stand inside HTML."""
    try:
        text = (ASSETS / name).read_bytes().decode("utf-8").replace("\r\n", "\n")
    except FileNotFoundError:
        raise DataError(
            f"{ASSETS / name} is missing: this copy of Trimtab was not built. Build it with: make web"
        ) from None
    closing = "</script" if name.endswith(".js") else "</style"
    if closing in text.lower() or "<!--" in text:
        raise DataError(f"{ASSETS / name} holds {closing} or <!--, which cannot stand inside a page. Build it again")
    return text


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
