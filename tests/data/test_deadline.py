"""A template that loops on one row alone, which the trial before a run does not meet: ended where it runs, and the row named."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import trimtab
from tests.data.conftest import make_tokenizer
from tests.tiny import tiny_model, tiny_tokenizer
from trimtab.base.errors import DataError
from trimtab.config.schema import Data
from trimtab.config.sft import SftData
from trimtab.data import deadline
from trimtab.data.deadline import render_within
from trimtab.data.examples import ExampleEncoder, validate_examples
from trimtab.data.prompts import validate_rows
from trimtab.data.stream import PromptStream, Stream
from trimtab.record.checkpoint import checkpoints

FOREVER = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LOOPS = "{% if 'loop' in messages[0].content %}" + FOREVER + "{% endif %}{{ messages[0].content }}"
WRITES = "{% if 'loop' in messages[0].content %}{{ 'x' * 10000001 }}{% endif %}{{ messages[0].content }}"
ROWS = [{"prompt": "loop" if number == 69 else f"number {number}"} for number in range(90)]
FOUND = r"data\.train, row 70 \(from 1\): the tokenizer's chat template does not finish: it took more than 1 s"


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    make_tokenizer(template=True).apply_chat_template([{"role": "user", "content": "1"}])  # it imports what it needs
    monkeypatch.setattr(deadline, "RENDER_TIMEOUT_S", 1.0)
    monkeypatch.setattr(deadline, "POLL_S", 0.02)


@pytest.mark.parametrize(
    ("template", "found"), [(LOOPS, FOUND), (WRITES, r"row 70 .* writes more than 10,000,000 characters")]
)
def test_a_later_prompt_that_loops_is_told_by_its_row(template: str, found: str) -> None:
    tokenizer, data = make_tokenizer(template=True), Data(train="x", shuffle=False)
    tokenizer.chat_template = template
    validate_rows(ROWS, data, tokenizer, source_name="data.train")
    with PromptStream(ROWS, data, tokenizer, max_prompt_tokens=100, seed=0) as stream:
        assert len(stream.take(64)) == 64
        with pytest.raises(DataError, match=found):
            stream.take(64)


def test_a_later_example_that_loops_is_told_by_its_row() -> None:
    tokenizer, rows = make_tokenizer(template=True), [row | {"completion": "1"} for row in ROWS]
    tokenizer.chat_template = LOOPS.replace("{{ messages[0].content }}", tokenizer.chat_template)
    encoder = ExampleEncoder(SftData(train="x"), "last", tokenizer, "data.train")
    validate_examples(rows, encoder)
    with (
        Stream(rows, encoder, most_tokens=100, seed=0, shuffle=False) as stream,
        pytest.raises(DataError, match=FOUND),
    ):
        stream.take(80)


def test_what_was_ended_leaves_nothing_behind() -> None:
    """In any thread, many times over: the next renderings go through, and no exception comes later."""

    def forever() -> str:
        while True:
            pass

    for _ in range(3):
        with pytest.raises(DataError, match=r"^here: .* does not finish"):
            render_within(forever, "here")
        assert [render_within(lambda: "text", "here") for _ in range(1000)] == ["text"] * 1000
    assert not deadline._watchdog._going
    errors: list[BaseException] = []

    def elsewhere() -> None:
        try:
            render_within(forever, "there")
        except DataError as error:
            errors.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(60)
    assert not thread.is_alive() and len(errors) == 1


def test_time_that_others_take_does_not_count() -> None:
    waiting = threading.Event()
    threading.Timer(1.6, waiting.set).start()
    assert render_within(lambda: str(waiting.wait(60)), "here") == "True"


def test_a_forked_child_renders_though_the_lock_was_held() -> None:
    with deadline._watchdog._lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if render_within(lambda: "text", "here") == "text" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_run_ends_with_the_row_and_goes_on_once_the_template_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small data set is read whole before the run, which then ends at once; of a large one, only the longest texts."""
    monkeypatch.setattr("trimtab.run.rollout_data.MEASURED_CHARACTERS", 0)
    monkeypatch.setattr("trimtab.run.rollout_data.PROBED_ROWS", 4)
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer(LOOPS).save_pretrained(tmp_path / "model")
    observe = {"dir": str(tmp_path / "run"), "tensorboard": False, "checkpoint_every": 100}

    def train(**more: Any) -> dict[str, Any]:
        return trimtab.train(
            model=str(tmp_path / "model"), data=ROWS, reward=lambda completions, **_: [1.0] * len(completions),
            learn={"steps": 11, "prompts_per_step": 8, "samples_per_prompt": 2, "max_new_tokens": 2}, observe=observe,
            overrides=["data.shuffle=false"], **more,
        )  # fmt: skip

    with pytest.raises(DataError, match=FOUND):
        train()
    assert list(checkpoints(tmp_path / "run")) == [8]  # 64 prompts were read before the batch that row 70 is in
    tiny_tokenizer("{{ messages[0].content }}").save_pretrained(tmp_path / "model")
    assert train(resume=True)["steps"] == 11
