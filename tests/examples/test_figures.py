"""Every number in README's results, and in those of bench/README.md, comes from a dated record in bench/results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.examples.figures import END, NUMBER, START, Figure, block, figures, problems, random_runs, recorded, runs_of

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "bench" / "README.md"
PAGES = {"README.md": ROOT / "README.md", "bench": SETTINGS}


@pytest.fixture
def changed(tmp_path: Path):
    """The problems of a page with these results; links lead to the records of this tree, as from README or from bench."""

    def check(text: str) -> list[str]:
        (tmp_path / "bench").mkdir(exist_ok=True)
        for name in ("bench/results", "results"):
            if not (tmp_path / name).exists():
                (tmp_path / name).symlink_to(ROOT / "bench" / "results")
        (tmp_path / "page.md").write_text(START + text + END)
        return problems(tmp_path / "page.md", SETTINGS)

    return check


@pytest.mark.parametrize("name", PAGES)
def test_every_figure_has_a_record(name: str) -> None:
    assert problems(PAGES[name], SETTINGS) == []


def rows(page: Path) -> list[str]:
    return [line for line in block(page).splitlines() if line.startswith("| ") and not line.startswith("| work")]


def test_the_readme_has_at_most_six_rows_and_bench_has_them_too() -> None:
    short, long = (rows(page) for page in PAGES.values())
    assert 3 <= len(short) <= 6 < len(long)
    rates = [tuple(line.split("|")[3:5]) for line in long]
    assert all(tuple(line.split("|")[3:5]) in rates for line in short)


def pieces(text: str) -> list[str]:
    """The paragraphs of a block, and its table row by row."""
    parts = re.split(r"\n\s*\n", text.strip())
    (table,) = (part.splitlines() for part in parts if part.startswith("|"))
    return [part for part in parts if not part.startswith("|")] + ["\n".join([*table[:2], row]) for row in table[2:]]


@pytest.mark.parametrize("name", PAGES)
def test_any_other_figure_is_refused(name: str, changed) -> None:
    """The check cannot pass for want of looking: each number of the block in turn, made larger, has no record."""
    looked_at = 0
    for text in pieces(block(PAGES[name])):
        plain = re.sub(r"\]\([^)]*\)|\[[^\]]*\d{4}-\d\d-\d\d\]", lambda m: "_" * len(m[0]), text)  # no link, no label
        for match in NUMBER.finditer(plain):
            if re.match(r"[BM]\b", plain[match.end() :]):
                continue
            looked_at += 1
            value, decimals = Figure(match[0], "").value, len(match[2].lstrip("."))
            others = [f"{value * factor + 1.01 * 10**-decimals:,.{decimals}f}" for factor in (1.1, 1.7)]
            accepted = [each for each in others if not changed(text[: match.start()] + each + text[match.end() :])]
            # One of the two may be another recorded number of a paragraph's file; in a table nothing else fits.
            allowed = 0 if text.startswith("|") else 1
            assert len(accepted) <= allowed, f"{match[0]} may as well be {accepted}: {text[: match.end()][-80:]!r}"
    assert looked_at > 50


TABLE = """
| work | peer | peer: tokens/s | Trimtab: tokens/s | | peer: GiB allocated (in use) | Trimtab: GiB allocated (in use) | record |
|---|---|---|---|---|---|---|---|
| GRPO step | TRL 1.16 | 14,129 | 97,788 | 6.9× | 115.7 (140.4) | 18.6 (40.9) | [G, 2026-11-15](results/grpo_step-2026-11-15.md) |
"""


@pytest.mark.parametrize(
    ("was", "now", "told"),
    [
        ("GRPO step", "GRPO step", ""),
        ("14,129 | 97,788", "97,788 | 14,129", "no run of G"),
        ("97,788", "113,494", "no run of G, 2026-11-15 has Trimtab's 113,494 tokens/s, 18.6 GiB allocated"),
        ("97,788", "96,970", "no run of G"),  # leaves out two steps: another statistic than the rest
        ("18.6 (40.9)", "40.9 (18.6)", "no run of G"),
        ("6.9×", "7.0×", "is 6.921"),
        ("6.9×", "", "there is no ratio"),
        ("14,129", "", "peer has no rate"),
        ("TRL 1.16", "TRL 1.17", "TRL 1.17 is not in the record"),
        ("[G, ", "[1.5b, ", "no run of 1.5b"),
        ("[G, 2026-11-15]", "[G, 2026-11-16]", "2026-11-16 is no record's date"),
        ("[G, 2026-11-15](results/grpo_step-2026-11-15.md)", "measured", "no link to a record"),
        ("GRPO step", "GRPO step of 33 prompts", "33 prompts is not in bench/README.md"),
    ],
)
def test_a_row_is_held_against_one_run_of_each_side(was: str, now: str, told: str, changed) -> None:
    found = changed(TABLE.replace(was, now))
    assert (told in "\n".join(found)) if told else not found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("It has 5.1 % (4.0 to 6.4) after 120 steps ([r](results/learning_gsm8k-2026-11-15.md)).", ""),
        ("It has 5.1 %.", "5.1 % without a link"),
        ("It has 5.1 % ([r](results/learning_chain_sum-2026-11-15.md)).", "5.1 % is not in learning_chain_sum"),
        ("It took 5.1 s ([r](results/learning_gsm8k-2026-11-15.md)).", "5.1 s is not in"),
        ("Between 0.33 and 1.42 times ([r](results/tuning_random-2026-11-15.json)).", ""),
        ("Between 0.9 and 1.42 times ([r](results/tuning_random-2026-11-15.json)).", "0.9 × is not in"),
    ],
)
def test_a_sentence_is_held_against_what_it_links(text: str, told: str, changed) -> None:
    found = changed(text)
    assert (told in "\n".join(found)) if told else not found


def test_units_are_read_from_headers_and_from_what_follows() -> None:
    shown = figures(
        "H200: 27 runs of SmolLM2-135M, 1.5B, 0.1 to 0.8 %, 6.8× and 3 times, TRL 1.16, 1,024 tokens/s, 2026-11-15"
    )
    assert [str(each) for each in shown] == [
        "27 runs", "1.5 b", "0.1 %", "0.8 %", "6.8 ×", "3 ×", "1.16 TRL", "1,024 tokens/s",
    ]  # fmt: skip
    assert list(map(str, figures("18.6 (40.9)", "GiB allocated (in use)"))) == ["18.6 GiB allocated", "40.9 in use"]
    assert Figure("1.42", "×").is_of(1.4203) and not Figure("1.42", "×").is_of(1.4250001)


def test_records_are_read_with_their_units() -> None:
    table = "| a | tokens/s | error |\n|---|---|---|\n| 7b | 28 | +42.8% |\n| b | 30 | 0.2% |\n| c | 29 | -0.1% |\n\nIn 3 runs."
    assert set(map(str, recorded(table))) == {
        "7 b",
        "28 tokens/s",
        "29 tokens/s",
        "30 tokens/s",
        "42.8 %",
        "0.1 %",
        "3 runs",
    }
    steps = {"workloads": {"G": {"trl, Liger": {"tokens": [9, 4, 6], "seconds": [9, 1, 3], "peak_used_gib": 7.0}}}}
    (run,) = runs_of(steps)
    assert (run.values, run.is_trimtab, {"G", "Liger"} <= run.words) == (
        {"tokens/s": 2.5, "in use": 7.0},
        False,
        True,
    )
    ended = {"outcome": "finished", "recoveries": 0, "predicted_over_measured": [0.9, 1.1]}
    assert list(map(str, random_runs([ended, ended | {"outcome": "crashed"}]))) == [
        "0.9 ×",
        "1.1 ×",
        "2 runs",
        "1 runs",
        "0 run",
    ]
