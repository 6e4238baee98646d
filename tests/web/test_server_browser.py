"""The served page in a real browser: every page is silent, asks this server alone, and shows rows as they are written."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.observe.planted import plant
from tests.web.browser import PAGES, Watched, launched, watched
from tests.web.serving import Serving, serving

LIVE_S = 2.0


def opened(page: Watched, server: Serving, place: str) -> None:
    page.address = f"http://127.0.0.1:{server.port}/"
    page.page.goto(f"{page.address}#/{place}")
    page.page.wait_for_selector("main .card, main .empty", timeout=60_000)


def test_every_page_of_every_kind_of_run_is_silent(tmp_path: Path) -> None:
    for name in ("healthy", "hostile", "running"):
        plant(tmp_path / "runs" / name, name)
    with serving(tmp_path / "runs") as server, launched() as browser:
        few = ("learning", "samples", "timeline", "log")
        for name, places in (("healthy", PAGES), ("hostile", few), ("running", few)):
            with watched(browser) as page:
                opened(page, server, f"overview?run={name}")
                for place in places:
                    page.turn(f"{place}?run={name}")
                page.check()
                assert page.page.evaluate("() => document.body.innerText").strip()
        with watched(browser) as page:
            opened(page, server, "runs")
            for name in ("healthy", "running"):  # the list is there once it was asked for
                page.page.wait_for_function("name => document.body.innerText.includes(name)", arg=name, timeout=60_000)
            page.check()


def test_a_row_is_on_the_page_within_two_seconds(tmp_path: Path) -> None:
    run = plant(tmp_path / "runs" / "running", "running")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    row = json.loads(lines[-1])
    with serving(tmp_path / "runs") as server, launched() as browser, watched(browser) as page:
        opened(page, server, "metrics?run=running")
        page.page.wait_for_timeout(1500)
        row |= {"step": row["step"] + 1, "reward/brand_new": 0.125}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        written = time.monotonic()
        page.page.wait_for_function("() => document.body.innerText.includes('reward/brand_new')", timeout=20_000)
        took = time.monotonic() - written
        assert took < 2 * LIVE_S, took  # the page, on a machine that may be busy
        page.check()
