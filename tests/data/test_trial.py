"""Templates that loop, write or need memory without end, and texts that no model can read: refused in time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.data.conftest import make_tokenizer
from trimtab.base.errors import DataError
from trimtab.config.reward_model import PairData
from trimtab.config.schema import Data
from trimtab.config.sft import SftData
from trimtab.data import trial
from trimtab.data.examples import ExampleEncoder, validate_examples
from trimtab.data.pairs import PairEncoder
from trimtab.data.prompts import validate_rows

ROWS = [{"prompt": "1", "completion": "2", "chosen": "3", "rejected": "4"}]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def prompts(tokenizer: Any, rows: list[dict[str, Any]]) -> None:
    validate_rows(rows, Data(train="x"), tokenizer, source_name="data.train")


def examples(tokenizer: Any, rows: list[dict[str, Any]]) -> None:
    validate_examples(rows, ExampleEncoder(SftData(train="x"), "last", tokenizer, "data.train"))


def pairs(tokenizer: Any, rows: list[dict[str, Any]]) -> None:
    validate_examples(rows, PairEncoder(PairData(train="x"), tokenizer, "data.train"))


USES = pytest.mark.parametrize("use", [prompts, examples, pairs])


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The processes that are forked in this test; the worker may have others, of tests before it."""
    forked: list[int] = []

    def fork() -> int:
        forked.append(child := os_fork())
        return child

    os_fork = os.fork
    monkeypatch.setattr(os, "fork", fork)
    return forked


def check_they_have_ended(children: list[int]) -> None:
    assert len(children) == 1
    with pytest.raises(ChildProcessError):
        os.waitpid(children[0], os.WNOHANG)


@USES
@pytest.mark.parametrize("template", [LOOPS, "{{ 9 ** (9 ** 9) }}"])
def test_a_template_that_loops_is_refused_and_leaves_no_process(
    use: Callable[..., None], template: str, children: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial.try_template, "__defaults__", (0.5,))
    tokenizer = make_tokenizer(template=True)
    tokenizer.chat_template = template
    with pytest.raises(DataError, match="chat template does not finish: it took more than 1 s"):
        use(tokenizer, ROWS)
    check_they_have_ended(children)


@USES
def test_a_template_that_writes_without_end(use: Callable[..., None]) -> None:
    tokenizer = make_tokenizer(template=True)
    tokenizer.chat_template = "{% for i in range(1200) %}{{ 'x' * 9000 }}{% endfor %}" + tokenizer.chat_template
    with pytest.raises(DataError, match="writes more than 10,000,000 characters for one conversation"):
        use(tokenizer, ROWS)


def test_a_template_that_needs_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "MAX_RENDER_BYTES", 2**28)
    tokenizer = make_tokenizer(template=True)
    tokenizer.chat_template = "{{ ('x' * 10 ** 9) | length }}"
    with pytest.raises(DataError, match="needs more than 0 GiB to render a conversation"):
        prompts(tokenizer, ROWS)


def test_what_a_template_refuses_is_told_by_the_rendering_itself() -> None:
    tokenizer = make_tokenizer(template=True)
    tokenizer.chat_template = "{{ raise_exception('no such turns') }}"
    with pytest.raises(DataError, match="rejects a conversation of user: no such turns"):
        prompts(tokenizer, ROWS)


def test_a_template_that_is_killed_by_the_kernel_is_told() -> None:
    with pytest.raises(DataError, match="needs more than 4 GiB"):
        trial.try_template([lambda: os.kill(os.getpid(), signal.SIGKILL)], "data.train")


def test_an_interrupt_ends_the_child(children: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(trial.time, "sleep", interrupted)
    with pytest.raises(KeyboardInterrupt):
        trial.try_template([lambda: time.monotonic() and signal.pause()], "data.train")
    check_they_have_ended(children)


@USES
@pytest.mark.parametrize("template", [False, True])
def test_a_text_that_no_model_can_read(use: Callable[..., None], template: bool) -> None:
    rows = [
        {name: "1" * (trial.MAX_TEXT_CHARACTERS + 1) if name == "prompt" else text for name, text in ROWS[0].items()}
    ]
    with pytest.raises(DataError, match="has 10,000,001 characters; the limit is 10,000,000"):
        use(make_tokenizer(template=template), rows)


@USES
def test_a_wrong_value_is_shown_in_part(use: Callable[..., None]) -> None:
    rows = [ROWS[0] | {"prompt": [["x" * 10_000]]}]
    with pytest.raises(DataError) as error:
        use(make_tokenizer(template=True), rows)
    assert len(str(error.value)) < 500
