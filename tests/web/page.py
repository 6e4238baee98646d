"""A page as the report writes it, for tests of the script alone: the shell, the style, the script, and any document as its data."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

WEB = Path(__file__).resolve().parents[2] / "src" / "trimtab" / "observe" / "web"


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


def page(document: dict[str, Any]) -> str:
    """The same Content-Security-Policy as the report's: nothing is loaded, nothing runs but the script itself."""
    script, style = (WEB / "app.js").read_text(), (WEB / "app.css").read_text()
    policy = f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:"
    data = base64.b64encode(gzip.compress(json.dumps(document).encode(), mtime=0)).decode()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>Trimtab</title><style>{style}</style></head><body>'
        f'<div id="app"></div><script type="application/octet-stream" id="data">{data}</script><script>{script}</script></body></html>'
    )
