"""The page itself, and its script and style: the same files that a report holds."""

from __future__ import annotations

import hashlib
from functools import cache

from starlette.responses import HTMLResponse, Response

from trimtab.base.package import PACKAGE

FOLDER = PACKAGE / "observe" / "web"
ASSETS = {"app.js": "text/javascript; charset=utf-8", "app.css": "text/css; charset=utf-8"}
"""Files that are served, and no others."""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="perfetto" content="https://ui.perfetto.dev">
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/assets/app.css">
<title>Trimtab</title>
</head>
<body>
<div id="app"><noscript>This page needs JavaScript; the first screen of `trimtab report` does not.</noscript></div>
<script src="/assets/app.js"></script>
</body>
</html>
"""


def shell() -> Response:
    return HTMLResponse(PAGE)


def asset(name: str, held: str | None) -> Response | None:
    """A file, or word that the one that the browser holds is still the same; None where there is no such file."""
    if name not in ASSETS:
        return None
    found = _read(name)
    if found is None:
        return None
    data, tag = found
    headers = {"etag": tag, "cache-control": "no-cache"}
    return (
        Response(status_code=304, headers=headers)
        if held == tag
        else Response(data, media_type=ASSETS[name], headers=headers)
    )


@cache
def _read(name: str) -> tuple[bytes, str] | None:
    try:
        data = (FOLDER / name).read_bytes()
    except FileNotFoundError:
        return None
    return data, f'"{hashlib.sha256(data).hexdigest()[:32]}"'
