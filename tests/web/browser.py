"""One browser for a module of tests, and what every page has to keep: silence, no request, no sideways scrolling, contrast."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PAGES = ("overview", "learning", "speed", "memory", "samples", "timeline", "plan", "log", "metrics")

CONTRAST = (Path(__file__).parent / "contrast.js").read_text()

NAMELESS = """() => [...document.querySelectorAll('button, a[href], input, select, summary, [role=img]')]
  .filter((e) => e.checkVisibility())
  .filter((e) => !(e.getAttribute('aria-label') || e.textContent.trim() || e.title || e.labels?.[0]?.textContent.trim()))
  .map((e) => e.outerHTML.slice(0, 120))"""

SCROLL_THROUGH = """async () => {
  for (let y = 0; y < document.documentElement.scrollHeight; y += 500) {
    scrollTo(0, y);
    await new Promise((go) => requestAnimationFrame(() => setTimeout(go, 15)));
  }
  scrollTo(0, 0);
}"""


@dataclass
class Watched:
    """A page, and everything that it said or asked for."""

    page: Any
    address: str = ""
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def open(self, path: Path, place: str = "") -> None:
        self.address = path.as_uri()
        self.page.goto(f"{self.address}#/{place}")
        self.page.wait_for_selector("main .card, main .empty")

    def turn(self, place: str) -> None:
        """Another page of the same file."""
        self.page.evaluate("place => { location.hash = '#/' + place }", place)
        self.page.wait_for_selector(f"main[data-page={place.split('?')[0]}]")
        self.page.wait_for_timeout(80)

    def sideways(self) -> int:
        return int(
            self.page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth")
        )

    def contrast(self) -> list[str]:
        return list(self.page.evaluate(CONTRAST))

    def nameless(self) -> list[str]:
        return list(self.page.evaluate(NAMELESS))

    def charts(self) -> dict[str, str]:
        """The state of every chart of this page, after all of it was in view."""
        self.page.evaluate(SCROLL_THROUGH)
        return dict(
            self.page.evaluate(
                "() => [...document.querySelectorAll('[data-chart]')].map((e) => [e.dataset.chart, e.dataset.state])"
            )
        )

    def check(self) -> None:
        assert self.said == []
        assert [url for url in self.asked if not url.startswith((self.address, "blob:"))] == []
        assert self.sideways() <= 0


@contextmanager
def launched() -> Iterator[Any]:
    """A browser; the test is skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if CHROMIUM is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def watched(browser: Any, width: int = 1440, height: int = 900, scheme: str = "light") -> Iterator[Watched]:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    page = context.new_page()
    found = Watched(page)
    page.on("console", lambda message: found.said.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: found.said.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (found.said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.on("request", lambda request: found.asked.append(request.url.split("#")[0]))
    yield found
    context.close()
