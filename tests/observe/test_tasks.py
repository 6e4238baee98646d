"""Tasks in metrics: which names they get, and numbers that add up to those of the step."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.data.prompt import Prompt
from trimtab.observe.metrics import reward_metrics
from trimtab.observe.task_names import MAX_TASKS, OTHER, metric_names
from trimtab.observe.tasks import Tasks, task_kl, task_metrics
from trimtab.rollout.trajectory import Group, Trajectory
from trimtab.update.samples import SampleCounts, to_samples, usable
from trimtab.update.updater import UpdateStats


def group(task: object, rewards: list[float | None], lengths: list[int]) -> Group:
    prompt = Prompt(0, "", [1], {"kind": task})
    made = []
    for sample, (reward, length) in enumerate(zip(rewards, lengths)):
        tokens = torch.arange(length)
        finish = "length" if length == 4 else "stop"
        failure = "boom" if reward is None else None
        made.append(Trajectory(prompt, sample, tokens, -tokens, tokens, finish, reward=reward, failure=failure))
    return Group(prompt, made)


GROUPS = [
    group("sums", [1.0, 0.0], [2, 4]),
    group("sums", [1.0, None], [4, 4]),
    group(7, [0.5, 0.5], [1, 3]),
]
TASKS = Tasks.found("kind", [g.prompt.columns for g in GROUPS])


def test_names_are_safe_and_each_for_one_task() -> None:
    names = metric_names(["sums/easy", "sums easy", "über", "", "other", "a" * 60])
    assert names == {
        "sums/easy": "sums_easy",
        "sums easy": "sums_easy_2",
        "über": "_ber",
        "": "_",
        "other": "other_2",
        "a" * 60: "a" * 40,
    }


@settings(deadline=None)
@given(st.lists(st.text(max_size=50), unique=True, max_size=80))
def test_names_are_few_and_do_not_depend_on_what_follows(tasks: list[str]) -> None:
    names = metric_names(tasks)
    assert len({*names.values(), OTHER}) == len(names) + 1
    assert len(names) == (len(tasks) if len(tasks) <= MAX_TASKS else MAX_TASKS - 1)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in names.values())
    front = tasks[: MAX_TASKS - 1]
    assert metric_names(front) == {task: names[task] for task in front}


def test_the_most_frequent_tasks_have_their_own_names_and_the_rest_one() -> None:
    rows = [{"kind": f"t{number}"} for number in range(40) for _ in range(40 - number)]
    tasks = Tasks.found("kind", rows, first=["t39"])
    assert tasks.of(Prompt(0, "", [1], {"kind": "t39"})) == "t39"
    assert tasks.of(Prompt(0, "", [1], {"kind": "t29"})) == "t29"
    assert tasks.of(Prompt(0, "", [1], {"kind": "t30"})) == OTHER


def test_rewards_and_lengths_by_hand() -> None:
    found = task_metrics(TASKS, GROUPS, zero_signal=GROUPS[1:])
    assert found["reward/task/sums/mean"] == pytest.approx(2 / 3)
    assert found["reward/task/sums/samples"] == 4
    assert found["reward/task/sums/failed"] == 1
    assert found["reward/task/sums/zero_std_groups"] == 0.5
    assert found["response/task/sums/length_mean"] == 3.5
    assert found["response/task/sums/truncated"] == 0.75
    assert found["reward/task/7/mean"] == 0.5
    assert found["reward/task/7/zero_std_groups"] == 1.0
    assert found["response/task/7/truncated"] == 0.0
    assert found.keys() - task_metrics(TASKS, GROUPS, None).keys() == {
        f"reward/task/{name}/zero_std_groups" for name in ("sums", "7")
    }


def test_rewards_that_failed_add_up_to_those_of_the_step() -> None:
    """What an environment failed at has no reward, but no reward failed."""
    lost = group("sums", [None, None, 1.0], [2, 3, 4])
    lost.trajectories[0].failed_in = "environment"
    groups = [*GROUPS, lost]
    kept, dropped = usable(groups)
    step = reward_metrics(groups, [], None, SampleCounts(9, sum(len(g.trajectories) for g in kept), dropped))
    found = task_metrics(TASKS, groups, None)
    assert step["reward/failed"] == found["reward/task/sums/failed"] + found["reward/task/7/failed"] == 2


def test_kl_is_the_mean_over_a_tasks_tokens() -> None:
    samples = to_samples(GROUPS)
    first = [samples[2][0], samples[0][1]], UpdateStats(kl_ref_of=[([1, 0], torch.tensor([0.8, 0.1]))])
    second = [samples[0][0], samples[2][1]], UpdateStats(kl_ref_of=[([0, 1], torch.tensor([0.4, 0.5]))])
    found = task_kl(TASKS, GROUPS, samples, [first, second])
    # sums: (0.8 + 0.4) over 4 + 2 tokens; 7: (0.1 + 0.5) over 1 + 3.
    assert found == {
        "policy/task/sums/kl_ref": pytest.approx(0.2),
        "policy/task/7/kl_ref": pytest.approx(0.15),
    }
