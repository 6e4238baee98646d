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

CONTRAST = """() => {
  const parse = (text) => (text.match(/[\\d.]+/g) || [0, 0, 0, 0]).map(Number);
  const over = ([r, g, b, a = 1], [R, G, B]) => [r * a + R * (1 - a), g * a + G * (1 - a), b * a + B * (1 - a)];
  const light = (rgb) => { const [r, g, b] = rgb.map((v) => ((v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(parse(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer.length < 4 ? [...layer, 1] : layer, below), [255, 255, 255]);
  };
  const found = new Map();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !element.checkVisibility({ visibilityProperty: true, opacityProperty: true }) || element.closest("script, style, .hide, [disabled], option")) continue;
    const style = getComputedStyle(element);
    const drawn = element instanceof SVGElement;
    if (drawn && element.classList.contains("inbar")) continue; // stands on a bar, not on the page: the palette is tested
    const back = behind(element);
    const ink = over(parse(drawn ? style.fill : style.color).concat(1).slice(0, 4), back);
    const [a, b] = [light(ink), light(back)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    const size = parseFloat(style.fontSize);
    const enough = size >= 24 || (size >= 18.5 && Number(style.fontWeight) >= 600) ? 3 : 4.5;
    if (ratio < enough) found.set(`${element.className?.baseVal ?? element.className}: ${walk.currentNode.data.trim().slice(0, 40)}`, ratio.toFixed(2));
  }
  return [...found].map(([what, ratio]) => `${ratio} ${what}`);
}"""

NAMELESS = """() => [...document.querySelectorAll('button, a[href], input, select, summary, [role=img]')]
  .filter((e) => e.checkVisibility() && !(e.getAttribute('aria-label') || e.textContent.trim() || e.title || e.labels?.[0]?.textContent.trim()))
  .map((e) => e.outerHTML.slice(0, 120))"""

SCROLL_THROUGH = """async () => {
  for (let y = 0; y < document.documentElement.scrollHeight; y += 500) { scrollTo(0, y); await new Promise((go) => requestAnimationFrame(() => setTimeout(go, 15))); }
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
        return int(self.page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def contrast(self) -> list[str]:
        return list(self.page.evaluate(CONTRAST))

    def nameless(self) -> list[str]:
        return list(self.page.evaluate(NAMELESS))

    def charts(self) -> dict[str, str]:
        """The state of every chart of this page, after all of it was in view."""
        self.page.evaluate(SCROLL_THROUGH)
        return dict(self.page.evaluate("() => [...document.querySelectorAll('[data-chart]')].map((e) => [e.dataset.chart, e.dataset.state])"))

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
