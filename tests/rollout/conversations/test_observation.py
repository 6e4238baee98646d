"""What an environment returns is checked where it lives: nothing reaches the trainer that it cannot read, send or write down."""

from __future__ import annotations

import threading
from datetime import datetime
from typing import Any

import pytest

from trimtab.observe.conversations import conversation_metrics
from trimtab.rollout.conversations.observation import (
    MEASURED,
    Observation,
    Refused,
    checked_observation,
    checked_opening,
)
from trimtab.rollout.trajectory import Conversation, Group, Trajectory


def message(**more: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": "hi", **more}]


@pytest.mark.parametrize(
    "value",
    [datetime(2026, 1, 1), float("nan"), threading.Lock(), object(), {1, 2}],
    ids=lambda value: type(value).__name__,
)
def test_a_message_that_cannot_be_written_as_json_is_refused(value: Any) -> None:
    for check in (checked_opening, checked_observation):
        with pytest.raises(Refused, match="cannot be written as JSON"):
            check(message(extra=value))


def test_a_message_may_say_more_than_role_and_content() -> None:
    given = message(name="add", tool_call_id=3, parts=[{"a": 1.5}, None])
    assert checked_observation(given).reply == given


@pytest.mark.parametrize(
    ("counts", "error"),
    [
        ([1, 2], "return names and numbers"),
        ({"failed": 1}, "environment/failed is a metric of Trimtab; give the count another name"),
        ({"a b": 1}, "without spaces and slashes"),
        ({"a": "many"}, "return a finite number"),
    ],
)
def test_counts_are_numbers_under_names_of_their_own(counts: Any, error: str) -> None:
    with pytest.raises(Refused, match=error):
        checked_observation(Observation(counts=counts))


def test_no_count_can_take_the_place_of_a_metric(one_token: Trajectory) -> None:
    """The names that are refused are all those that Trimtab writes; a tool's own three counts are added as others are."""
    metrics = conversation_metrics([Group(one_token.prompt, [one_token])], 0.0)
    assert {name.removeprefix("environment/") for name in metrics} == MEASURED | {"tool_calls"}


@pytest.fixture
def one_token() -> Trajectory:
    import torch

    from trimtab.data.prompt import Prompt

    conversation = Conversation()
    conversation.counts["tool_calls"] = 1
    versions = torch.zeros(1, dtype=torch.int32)
    return Trajectory(
        Prompt(0, "", [5], {}), 0, torch.tensor([4]), torch.zeros(1), versions, "stop", conversation=conversation
    )
