"""Batches that wait, in a checkpoint and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trimtab.base.errors import TrainingError
from trimtab.data.prompt import Prompt
from trimtab.record.batches import FACTS, TENSORS, SampledBatch, batch_files, load_batches
from trimtab.rollout.trajectory import Conversation, Group, Trajectory

PROMPTS = [Prompt(number, f"prompt {number}", list(range(number + 1)), {"answer": number}) for number in range(5)]
FLOATS = st.floats(-1e30, 1e30)


def by_number(ids: Sequence[int]) -> list[Prompt]:
    return [PROMPTS[number] for number in ids]


@st.composite
def trajectories(draw: st.DrawFn, prompt: Prompt, sample: int, scored: bool) -> Trajectory:
    tokens = torch.tensor(draw(st.lists(st.integers(0, 2**40), max_size=6)), dtype=torch.int64)
    mask = draw(st.none() | st.lists(st.booleans(), min_size=len(tokens), max_size=len(tokens)))
    drawn = len(tokens) if mask is None else sum(mask)
    played = draw(st.booleans())
    opening = draw(st.lists(st.integers(0, 99), max_size=3)) if played else []
    lost = draw(st.booleans()) and played
    rewards = draw(st.dictionaries(st.text(max_size=3), FLOATS, max_size=2)) if scored else {}
    return Trajectory(
        replace(prompt, tokens=prompt.tokens + opening) if opening else prompt,
        sample,
        tokens,
        torch.tensor(draw(st.lists(st.floats(-9, 0, width=32), min_size=drawn, max_size=drawn)), dtype=torch.float32),
        torch.full((drawn,), draw(st.integers(0, 9)), dtype=torch.int32),
        draw(st.sampled_from(["stop", "length", "turns", "failed"])),
        draw(st.text()),
        rewards,
        draw(st.none() | FLOATS) if scored else None,
        "its environment failed" if lost else None,
        "environment" if lost else "reward",
        None,
        None if mask is None else torch.tensor(mask, dtype=torch.bool),
        Conversation([{"role": "user", "content": "?"}], 1.5, Counter(calls=2), 0.25) if played else None,
    )


@st.composite
def batches(draw: st.DrawFn) -> list[SampledBatch]:
    found = []
    count = draw(st.integers(1, 3))
    for number in range(count):
        scored = number < count - 1 or draw(st.booleans())
        prompts = draw(st.lists(st.sampled_from(PROMPTS), max_size=3))
        groups = [
            Group(
                prompt, [draw(trajectories(prompt, sample, scored)) for sample in range(draw(st.integers(1, 3)))], index
            )
            for index, prompt in enumerate(prompts)
        ]
        found.append(SampledBatch(7 + number, groups, scored, {"rollout/tokens": draw(FLOATS)}))
    return found


def plain(batch: SampledBatch) -> object:
    """With lists instead of tensors, which compare."""

    def walk(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return str(value.dtype), value.tolist()
        if is_dataclass(value):
            return {each.name: walk(getattr(value, each.name)) for each in fields(value)}
        if isinstance(value, dict):
            return {key: walk(each) for key, each in value.items()}
        return [walk(each) for each in value] if isinstance(value, list) else value

    return walk(batch)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


@given(batches())
def test_what_is_read_is_what_was_written(tmp_path_factory: pytest.TempPathFactory, found: list[SampledBatch]) -> None:
    folder = write(tmp_path_factory.mktemp("checkpoints") / "step-7", batch_files(found))
    assert [plain(batch) for batch in load_batches(folder, by_number)] == [plain(batch) for batch in found]


def trajectory(**changes: object) -> Trajectory:
    tokens = torch.tensor([1, 2, 3])
    return replace(
        Trajectory(PROMPTS[0], 0, tokens, torch.zeros(3), torch.zeros(3, dtype=torch.int32), "stop", "abc"), **changes
    )


def test_a_reward_that_failed_before_all_were_there_is_computed_again(tmp_path: Path) -> None:
    failed = trajectory(failure="reward 'x' raised", rewards={"y": 1.0})
    lost = trajectory(failure="the environment failed", failed_in="environment")
    batch = SampledBatch(0, [Group(PROMPTS[0], [failed, lost])])
    (found,) = load_batches(write(tmp_path / "step-1", batch_files([batch])), by_number)
    again, gone = found.groups[0].trajectories
    assert (again.failure, again.rewards) == (None, {})
    assert gone.failure == "the environment failed"


def test_nothing_waits() -> None:
    assert batch_files([]) == {}


@pytest.mark.parametrize("take", [0, 1])
def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, take: int) -> None:
    one, two = (batch_files([SampledBatch(0, [Group(PROMPTS[0], [trajectory()] * count)])]) for count in (1, 2))
    facts, tensors = ((one, two), (two, one))[take]
    folder = write(tmp_path / "step-1", {FACTS: facts[FACTS], TENSORS: tensors[TENSORS]})
    with pytest.raises(TrainingError, match=r"other tokens than|too few tokens"):
        load_batches(folder, by_number)
