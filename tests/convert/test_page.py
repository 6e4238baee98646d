"""docs/convert.md says of each flag what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from trimtab.convert import FRAMEWORKS, convert, page


def test_the_page_in_docs_is_current() -> None:
    assert page.main(["--check"]) == 0, "run python -m trimtab.convert.page"


def test_every_name_is_on_the_page() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    for framework in FRAMEWORKS.values():
        for rule in framework.rules:
            assert all(f"`{framework.dashes}{name}`" in text for name in rule.names), rule.name


def test_the_words_say_of_a_reward_model_what_the_command_does() -> None:
    words = page.PAGE.read_text(encoding="utf-8").split(page.START)[0]
    found = convert("openrlhf", words=["--reward_pretrain=org/rm"])
    assert found.sheet.tree()["reward"] == [{"fn": "model:org/rm"}]
    assert "`fn: model:PATH`" in words and "cannot be named as a reward" not in words


def test_check_fails_on_a_stale_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PAGE", tmp_path / "convert.md")
    page.PAGE.write_text(f"words\n{page.START}old{page.END}\nmore\n", encoding="utf-8")
    assert page.main(["--check"]) == 1
    assert page.main([]) == 0 and page.main(["--check"]) == 0
    text = page.PAGE.read_text(encoding="utf-8")
    assert text.startswith("words\n") and text.endswith("\nmore\n") and "old" not in text.splitlines()
    assert page.main(["--chekc"]) == 2
