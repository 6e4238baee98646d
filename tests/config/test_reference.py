"""The reference: every key is documented, in words, and the page in docs/ is what the schema says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trimtab.config import reference
from trimtab.config.learn import Learn
from trimtab.config.run import Rollout
from trimtab.config.schema import Data


def test_the_page_in_docs_is_current() -> None:
    assert reference.main(["--check"]) == 0, "run python -m trimtab.config.reference"


def test_check_fails_on_a_stale_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "PAGE", tmp_path / "docs" / "configuration.md")
    assert reference.main(["--check"]) == 1
    assert reference.main([]) == 0
    assert reference.main(["--check"]) == 0
    reference.PAGE.write_text("old")
    assert reference.main(["--check"]) == 1
    assert reference.main(["--chekc"]) == 2


def test_every_key_is_on_the_page_with_a_description() -> None:
    page = reference.page()
    for entry in reference.entries():
        assert f"`{entry.name}`" in page
        assert reference.description(entry.field), entry.name
    assert "**`learn` changes what is learned. `run` never does.**" in page


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        (Learn, "lr", "a number above 0"),
        (Learn, "max_grad_norm", "a number above 0, or null"),
        (Learn, "loss", "one of clip, sequence_clip, gspo, cispo, on_policy, auto"),
        (Learn, "reward_clip", "a list of 2, each a number, or null"),
        (Rollout, "kv_memory", "a size such as 512MiB or 2GiB, or auto"),
        (Rollout, "max_sequences", "a whole number of at least 1, or auto"),
        (Rollout, "prefix_cache", "true or false"),
        (Data, "eval", "text, or null"),
        (Data, "options", "a mapping"),
    ],
)
def test_types_are_said_in_words(section: type, key: str, words: str) -> None:
    field = section.model_fields[key]  # type: ignore[attr-defined]
    assert reference.words(field.annotation, field.metadata) == words


def test_defaults_are_those_the_section_starts_with() -> None:
    assert reference.default("eval.sampling.temperature") == 0.0
    assert reference.default("learn.sampling.temperature") == 1.0
    assert reference.default("reward.3.weight") == 1.0
    assert reference.default("model.path") is None


def test_configuration_needs_no_torch() -> None:
    code = "import sys, trimtab.config.load, trimtab.config.reference; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
