"""Rewards of conversations: who sees what, what the environment gave, and what it lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trimtab.config.schema import RewardPart
from trimtab.data.prompt import Prompt
from trimtab.reward.scorer import Scorer, check_failures
from trimtab.rollout.trajectory import Conversation, Group, Trajectory


def conversation(
    *turns: tuple[str, str], earned: float = 0.0, failure: str | None = None, prompt: Any = "q"
) -> Trajectory:
    """(role letter, text) pairs; one token a character."""
    roles = {"a": "assistant", "t": "tool"}
    conversation = Conversation([{"role": roles[who], "content": text} for who, text in turns], earned)
    own = torch.tensor([who == "a" for who, text in turns for _ in text], dtype=torch.bool)
    text = "".join(text for _, text in turns)
    count = int(own.sum())
    return Trajectory(
        Prompt(0, prompt, [1], {"answer": "42"}), 0, torch.arange(len(own)), torch.zeros(count), torch.zeros(count),
        "failed" if failure else "stop", text, failure=failure, failed_in="environment" if failure else "reward", policy_mask=own,
        conversation=conversation,
    )  # fmt: skip


def group(*trajectories: Trajectory) -> Group:
    return Group(trajectories[0].prompt, list(trajectories))


RIGHT = (("a", "call"), ("t", "42"), ("a", "42"))
COPIED = (("a", "call"), ("t", "42"), ("a", "7"))
"""Its environment said the answer, the model did not."""


@pytest.mark.parametrize("prompt", ["q", [{"role": "user", "content": "q"}]], ids=["text", "messages"])
def test_built_in_rewards_read_what_the_model_said_last(scorer, prompt: Any) -> None:
    parts = [RewardPart(fn=fn, name=fn) for fn in ("exact_match", "number_match")]
    parts.append(RewardPart(fn="regex", args={"pattern": "4"}))
    parts.append(RewardPart(fn="length", args={"max_tokens": 8}))
    with_rewards: Scorer = scorer(*parts)
    with_rewards.submit(group(conversation(*RIGHT, prompt=prompt), conversation(*COPIED, prompt=prompt)))
    right, copied = with_rewards.collect()[0].trajectories
    assert right.rewards == {"exact_match": 1.0, "number_match": 1.0, "regex": 1.0, "length": -6 / 8}
    assert copied.rewards == {"exact_match": 0.0, "number_match": 0.0, "regex": 0.0, "length": -5 / 8}


def test_functions_see_everything(scorer) -> None:
    def everything(completions, completion_ids, turns, environment_reward, prompts):  # type: ignore[no-untyped-def]
        assert completions == ["call4242", "call427"]
        assert completion_ids == [[0, 1, 2, 3, 6, 7], [0, 1, 2, 3, 6]]
        assert [turn["role"] for turn in turns[0]] == ["assistant", "tool", "assistant"]
        return environment_reward

    with_rewards: Scorer = scorer(RewardPart(fn="object:everything"), functions={"everything": everything})
    with_rewards.check({"answer"}, played=True)
    with_rewards.submit(group(conversation(*RIGHT, earned=2.0), conversation(*COPIED, earned=-1.0)))
    assert [t.reward for t in with_rewards.collect()[0].trajectories] == [2.0, -1.0]


def test_what_the_environment_gave_is_a_part(scorer) -> None:
    with_rewards: Scorer = scorer(RewardPart(fn="environment", weight=0.5), RewardPart(fn="exact_match"))
    with_rewards.submit(group(conversation(*RIGHT, earned=3.0), conversation(*COPIED)))
    one, two = with_rewards.collect()[0].trajectories
    assert (one.rewards, one.reward) == ({"environment": 3.0, "exact_match": 1.0}, 2.5)
    assert (two.rewards, two.reward) == ({"environment": 0.0, "exact_match": 0.0}, 0.0)


def test_what_the_environment_lost_is_not_scored_and_keeps_its_reason(scorer) -> None:
    with_rewards: Scorer = scorer(RewardPart(fn="exact_match"), RewardPart(fn="environment"))
    lost = conversation(("a", "call"), failure="environment, step 1: it hung")
    empty = conversation(failure="environment, reset: it raised")
    with_rewards.submit(group(conversation(*RIGHT), lost, empty))
    with_rewards.submit(group(conversation(failure="environment, reset: it raised")))
    first, second = with_rewards.collect()
    assert first.trajectories[0].reward == 1.0
    assert [(t.reward, t.failure) for t in first.trajectories[1:]] == [
        (None, "environment, step 1: it hung"),
        (None, "environment, reset: it raised"),
    ]
    assert second.trajectories[0].reward is None
    assert with_rewards.stats.failed == 3
    with pytest.raises(Exception, match="3 of 4 samples have no reward because environment calls failed"):
        check_failures([first, second], 0.5)
    check_failures([first, second], 0.8)


def test_a_function_that_asks_for_turns_needs_an_environment(scorer) -> None:
    def asks(turns: Any, **_: Any) -> list[float]:
        return [0.0 for _ in turns]

    with_rewards: Scorer = scorer(RewardPart(fn="object:asks"), functions={"asks": asks})
    with_rewards.check({"answer"}, played=True)
    with pytest.raises(Exception, match="needs a column 'turns', which not every row of the data has"):
        with_rewards.check({"answer"})


def test_more_than_float32_holds_is_no_reward_of_an_environment(scorer) -> None:
    with_rewards: Scorer = scorer(RewardPart(fn="environment"))
    with_rewards.submit(group(conversation(*RIGHT, earned=1e300), conversation(*COPIED, earned=1.0)))
    huge, other = with_rewards.collect()[0].trajectories
    assert huge.reward is None and "a number within the range of float32" in str(huge.failure)
    assert other.reward == 1.0
