"""The pages in a real browser, over planted run folders: silent, alone, readable, and the verdict on the first screen.

The quick suite covers pairs: every folder in every width and scheme, every page in every width and scheme. `-m slow` opens every
page of every folder in every combination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.observe.planted import NAMES, plant
from tests.observe.planted_parts import plant_samples
from tests.running import wait_for
from tests.web.browser import PAGES, Watched, launched, watched
from trimtab.observe import gains
from trimtab.observe.look import look_at
from trimtab.observe.web import data
from trimtab.observe.web.report import report_page, write_report

pytestmark = pytest.mark.timeout(240)

QUICK = (
    "healthy", "rollout_tail", "failed", "resumed", "one_step", "no_evaluation", "sft", "reward_model", "two_thousand", "hostile",
    "old_version", "quiet", "starting", "damaged",
)  # fmt: skip
VIEWS = [(width, scheme) for width in (1440, 1024, 390) for scheme in ("light", "dark")]
SUBSTITUTES = {
    "logprob_gap": "kl_ref",
    "kl_ref": "logprob_gap",
    "length": "explained_variance",
    "explained_variance": "length",
}
"""Small charts of the first screen of which one stands for the other."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """The page of a planted folder and its document, written once."""
    folder = tmp_path_factory.mktemp("reports")
    written: dict[str, tuple[Path, dict[str, Any]]] = {}

    def make(*names: str) -> tuple[Path, dict[str, Any]]:
        key = "+".join(names)
        if key not in written:
            runs = [folder / name for name in names]
            for run in runs:
                if not run.exists():
                    plant(run, run.name)
            looks = [look_at(run) for run in runs]
            with pytest.MonkeyPatch.context() as patch:
                most = 2 if names == ("healthy",) else 0  # plans take seconds, and are the same for all of them
                patch.setattr(gains, "MAX_CANDIDATES", most)
                document = data.report_document(looks)
            path = folder / f"{key}.html"
            path.write_bytes(report_page(document, looks[0]))
            written[key] = path, document
        return written[key]

    return make


def explained(page: Watched, document: dict[str, Any], place: str) -> None:
    """Every chart of the catalogue that belongs on this page is drawn, or the page says why not."""
    stage = document["runs"][0]["stage"]
    states = page.charts()
    wanted = [chart for chart in document["catalogue"] if chart["page"] == place and stage in chart["stages"]]
    for chart in wanted:
        if chart["id"] not in states and SUBSTITUTES.get(chart["id"]) in states:
            continue
        assert states.get(chart["id"]) in ("drawn", "explained"), (place, chart["id"], states.get(chart["id"]))
    assert wanted


Visit = tuple[str, int, str]


def visits(name: str) -> list[Visit]:
    """Page, width and scheme, in which the quick suite sees a folder: the first screen, and some of all others in turn."""
    at = QUICK.index(name)
    dealt = [(place, *view) for place in PAGES for view in VIEWS]
    other = ("dark", "light")[at % 2]
    return [("overview", 1440, other), ("overview", 390, other), *dealt[at :: len(QUICK)]]


def test_visits_cover_every_pair() -> None:
    seen = [(name, *visit) for name in QUICK for visit in visits(name)]
    values = (QUICK, PAGES, (1440, 1024, 390), ("light", "dark"))
    for one, other in ((0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        pairs = {(visit[one], visit[other]) for visit in seen}
        assert pairs == set(product(values[one], values[other])), (one, other)


@pytest.mark.parametrize("name", QUICK)
def test_folder_in_every_width_and_scheme(browser: Any, report: Any, name: str) -> None:
    path, document = report(name)
    with watched(browser) as page:
        page.open(path)
        for place, width, scheme in visits(name):
            page.page.set_viewport_size({"width": width, "height": 900})
            page.page.emulate_media(color_scheme=scheme)
            page.turn(place)
            page.page.wait_for_selector(f"html[data-theme={scheme}]", state="attached")
            if (place, width) == ("overview", 1440):
                first_screen(page, document)
            look_over(page, document, place)
            assert page.nameless() == []


def look_over(page: Watched, document: dict[str, Any], place: str) -> None:
    if place in ("overview", "learning", "speed", "memory"):
        explained(page, document, place)
    assert page.contrast() == []
    page.check()


def first_screen(page: Watched, document: dict[str, Any]) -> None:
    verdict = page.page.locator(".verdict")
    assert verdict.get_attribute("data-level") == document["runs"][0]["verdict"]["level"]
    box = verdict.bounding_box()
    assert box is not None and box["y"] + box["height"] < 900
    shown = verdict.inner_text()
    for part in document["runs"][0]["verdict"]["parts"]:
        assert " ".join(part["text"].replace("`", "").split()) in " ".join(shown.split())


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), VIEWS)
@pytest.mark.parametrize("name", NAMES)
def test_every_page_of_every_folder_in_every_view(
    browser: Any, report: Any, name: str, width: int, scheme: str
) -> None:
    path, document = report(name)
    with watched(browser, width, 900, scheme) as page:
        page.open(path)
        for place in PAGES:
            page.turn(place)
            look_over(page, document, place)


@pytest.mark.slow
def test_ten_thousand_steps_and_a_gigabyte_of_samples_open_at_once(browser: Any, tmp_path: Path) -> None:
    folder = plant_samples(plant(tmp_path / "run", "ten_thousand"), 10_000, 1_000_000_000)
    written = write_report([folder])
    assert written.size < 15_000_000
    with watched(browser) as page:
        begun = processor_seconds()
        page.open(written.path)
        page.page.wait_for_selector(".minis canvas")
        assert (
            processor_seconds() - begun < 3.0
        )  # what it takes on a machine of its own, at most: this one may be shared
        page.check()


def processor_seconds() -> float:
    """Of the browser, all of its processes."""
    return sum(sum(process.cpu_times()[:2]) for process in psutil.Process().children(recursive=True))


def test_first_screen_needs_no_scrolling(browser: Any, report: Any) -> None:
    path, _ = report("healthy")
    with watched(browser) as page:
        page.open(path)
        bottoms = page.page.evaluate(
            "() => ['.verdict', '.cards', '.two', '.minis'].map((s) => document.querySelector(s).getBoundingClientRect().bottom)"
        )
        assert max(bottoms) <= 900
        assert page.page.evaluate("() => document.querySelector('.samples-head').getBoundingClientRect().top") < 900


def test_hostile_text_stays_text(browser: Any, report: Any) -> None:
    path, _ = report("hostile")
    with watched(browser) as page:
        page.open(path)
        scripts = page.page.evaluate("() => document.scripts.length")
        for place in PAGES:
            page.turn(place)
            page.check()
        page.turn("samples")
        page.page.get_by_role("button", name="Markdown").click()
        for _ in range(12):
            page.page.keyboard.press("j")
        page.check()
        assert page.page.evaluate("() => [window.planted ?? null, document.scripts.length]") == [None, scripts]
        assert page.page.locator("main img, main iframe, main a[href^=http]").count() == 0
        assert page.page.locator(".ctl").count() > 0  # marks that reorder text are shown by name
        bidi = "[\\u202a-\\u202e\\u2066-\\u2069]"
        assert page.page.evaluate(f"() => /{bidi}/.test(document.querySelector('main').innerText)") is False


def test_keyboard(browser: Any, report: Any) -> None:
    path, _ = report("healthy")
    with watched(browser) as page:
        page.open(path)
        keys, focused = page.page.keyboard, "() => document.activeElement"
        keys.press("Tab")
        assert page.page.evaluate(f"({focused})().className") == "skip"
        seen = []
        for _ in range(40):
            keys.press("Tab")
            seen.append(page.page.evaluate(f"({focused})().textContent"))
            outline = page.page.evaluate(f"getComputedStyle(({focused})()).outlineStyle")
            assert outline != "none", seen[-1]
        assert {"Overview", "Learning", "All metrics"} <= {text.strip() for text in seen}
        keys.press("?")
        page.page.wait_for_selector("dialog[open]")
        keys.press("Escape")
        page.page.wait_for_selector("dialog[open]", state="detached")
        keys.press("/")
        page.page.wait_for_selector("main[data-page=samples]")
        assert wait_for(
            lambda: page.page.evaluate("document.activeElement.type") == "search"
        )  # the page allows no eval
        page.page.evaluate("document.activeElement.blur()")
        keys.press("j")
        assert "group=" in page.page.url
        page.turn("learning")
        page.page.locator("[data-chart=entropy_page] .plot").focus()
        keys.press("ArrowRight")
        assert page.page.locator("[data-chart=entropy_page] .readout").inner_text().startswith("step 1")
        page.check()


def test_dragging_zooms_every_chart_and_the_address_keeps_it(browser: Any, report: Any) -> None:
    path, _ = report("healthy")
    with watched(browser) as page:
        page.open(path, "learning")
        box = page.page.locator("[data-chart=entropy_page] .u-over").bounding_box()
        assert box is not None
        mouse = page.page.mouse
        page.page.locator("[data-chart=entropy_page]").scroll_into_view_if_needed()
        box = page.page.locator("[data-chart=entropy_page] .u-over").bounding_box()
        mouse.move(box["x"] + 100, box["y"] + 40)
        mouse.down()
        mouse.move(box["x"] + 300, box["y"] + 40, steps=4)
        mouse.up()
        assert wait_for(lambda: "zoom=" in page.page.evaluate("location.hash"))
        address = page.page.url
        page.page.mouse.dblclick(box["x"] + 150, box["y"] + 40)
        assert wait_for(lambda: "zoom=" not in page.page.evaluate("location.hash"))
        page.page.goto("about:blank")
        page.page.goto(address)
        page.page.wait_for_selector("text=Show everything")
        page.asked.clear()
        page.check()


def test_chart_as_table_csv_and_svg(browser: Any, report: Any, tmp_path: Path) -> None:
    path, _ = report("resumed")
    with watched(browser) as page:
        page.open(path, "learning")
        chart = page.page.locator("[data-chart=entropy_page]")
        chart.scroll_into_view_if_needed()

        def pick(text: str) -> Any:
            chart.locator("summary").click()
            return chart.get_by_role("button", name=text)

        with page.page.expect_download() as csv:
            pick("Download CSV").click()
        text = Path(csv.value.path()).read_text()
        assert text.startswith("step,") and text.count("\n") == 151
        with page.page.expect_download() as svg:
            pick("Download SVG").click()
        drawing = Path(svg.value.path()).read_text()
        assert drawing.startswith("<svg") and "Entropy" in drawing and "resumed at step 91" in drawing
        pick("As a table").click()
        assert chart.locator(".data-row").count() > 5
        pick("As a chart").click()
        pick("Log scale").click()
        page.check()


def test_samples_are_searched_by_text_and_by_expression(browser: Any, report: Any) -> None:
    path, _ = report("healthy")
    with watched(browser) as page:
        page.open(path, "samples?q=buys%2031%20more")
        page.page.wait_for_selector("text=of those in this report")
        assert page.page.locator(".groups .group-row").count() > 0
        page.page.get_by_label("expression").check()
        page.page.get_by_label("search samples").fill("buys (")
        page.page.wait_for_selector("text=/Invalid regular expression/")
        page.page.get_by_label("search samples").fill("buys 3[0-9] more")
        page.page.wait_for_selector("text=of those in this report")
        page.check()


def test_findings_as_they_read_at_an_earlier_step(browser: Any, report: Any) -> None:
    path, document = report("rollout_tail")
    (first, *_), found = document["runs"][0]["earlier"], document["runs"][0]["findings"]
    assert first["findings"][0]["evidence"] != found[0]["evidence"]
    with watched(browser) as page:
        page.open(path, "log")
        assert found[0]["evidence"] in page.page.locator(".finding").first.inner_text()
        page.page.get_by_label("as they read after step").select_option(str(first["step"]))
        page.page.wait_for_selector(f"text={first['findings'][0]['evidence']}")
        assert f"at={first['step']}" in page.page.url and page.page.locator(".finding").count() == len(
            first["findings"]
        )
        page.page.get_by_label("as they read after step").select_option("")
        page.page.wait_for_selector(f"text={found[0]['evidence']}")
        page.check()


def test_same_prompt_over_time_is_compared_word_by_word(browser: Any, report: Any) -> None:
    path, document = report("healthy")
    rows = document["runs"][0]["samples"]["rows"]
    steps: dict[str, set[str]] = {}
    for key, samples in rows.items():
        for sample in samples:
            steps.setdefault(f"{key.split(':')[0]}|{sample['prompt_id']}", set()).add(key.split(":")[1])
    kind, prompt = next(key for key, found in steps.items() if len(found) > 1).split("|")
    step = max(steps[f"{kind}|{prompt}"], key=int)
    with watched(browser) as page:
        page.open(path, f"samples?kind={kind}&step={step}&group={prompt}")
        page.page.wait_for_selector("text=The same prompt over time")
        page.page.get_by_label("compare this sample with").select_option(index=1)
        assert page.page.locator(".diff").inner_text()
        page.check()


def test_compare(browser: Any, report: Any) -> None:
    path, _ = report("healthy", "rollout_tail")
    with watched(browser) as page:
        page.open(path)
        page.page.wait_for_selector("text=Keys that differ")
        assert page.page.locator(".compare th").count() >= 3
        states = page.charts()
        assert len(states) > 10 and set(states.values()) == {"drawn"}
        assert page.contrast() == []
        page.check()
        page.page.set_viewport_size({"width": 390, "height": 844})
        page.page.wait_for_timeout(150)
        page.check()


def test_twenty_thousand_spans_are_drawn_within_a_frame(browser: Any, report: Any, tmp_path: Path) -> None:
    written, document = report("one_step")
    run = document["runs"][0] | {"trace": many_spans(20_000)}
    path = tmp_path / "spans.html"
    path.write_bytes(report_page(document | {"runs": [run]}, look_at(written.with_suffix(""))))
    with watched(browser) as page:
        page.open(path, "timeline")
        page.page.get_by_role("button", name="Whole run").click()
        page.page.wait_for_timeout(300)
        times = []
        for _ in range(5):
            page.page.get_by_role("button", name="zoom in").click()
            page.page.wait_for_timeout(120)
            times.append(float(page.page.locator("canvas").get_attribute("data-ms")))
        assert sorted(times)[2] < 50, times  # 16 on a machine of its own; the test machine is shared
        page.check()


def many_spans(count: int) -> dict[str, Any]:
    spans = [[0, f"step {n}", n * 1_000_000, 990_000, n, None] for n in range(count // 20)]
    spans += [[1, "decode", n * 50_000, 45_000, n // 20, {"tokens": n}] for n in range(count)]
    return {
        "spans": spans,
        "tracks": ["phases", "engine"],
        "counters": {"running sequences": [[n * 50_000, n % 64] for n in range(count)]},
        "left_out": 0,
    }


def test_prints_on_a4(browser: Any, report: Any) -> None:
    path, _ = report("healthy")
    with watched(browser, scheme="dark") as page:
        page.open(path)
        assert page.page.pdf(format="A4", print_background=True)[:5] == b"%PDF-"
        page.page.emulate_media(media="print")
        style = "(of, name) => getComputedStyle(document.querySelector(of)).getPropertyValue(name)"
        found = page.page.evaluate(
            f"[['.u-wrap > canvas', 'max-width'], ['.u-over', 'display']].map((each) => ({style})(...each))"
        )
        assert found == ["100%", "none"], "charts were drawn for a screen, and paper is narrower"
        page.check()
