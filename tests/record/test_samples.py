"""Sample files show both ends of a batch and something between, whole groups first, and everything known about a completion."""

import json
import random

import torch

from trimtab.data.prompt import Prompt
from trimtab.record.samples import choose_samples, sample_rows, write_samples
from trimtab.rollout.trajectory import Group, Trajectory


def trajectory(prompt, sample, reward, **fields):
    tokens = torch.zeros(sample + 1, dtype=torch.int64)
    fields = {"finish": "stop", "text": f"text {sample}"} | fields
    return Trajectory(prompt, sample, tokens, tokens.float(), tokens.int(), reward=reward, **fields)


def group(id, rewards):
    prompt = Prompt(id, f"prompt {id}", [1, 2])
    return Group(prompt, [trajectory(prompt, i, reward) for i, reward in enumerate(rewards)])


def why(groups, max_rows, seed=0):
    found = choose_samples(groups, max_rows, random.Random(seed))
    return [(each.trajectory.prompt.id, each.trajectory.sample, each.chosen) for each in found]


def chosen(groups, max_rows):
    return [(id, sample) for id, sample, _ in why(groups, max_rows)]


def test_best_then_worst_then_a_random_one_in_whole_groups():
    groups = [group(0, [0.5, 0.5]), group(1, [0.0, 0.1]), group(2, [1.0, 0.9]), group(3, [0.2, 0.3])]
    found = why(groups, 7)
    assert found[:4] == [(2, 0, "best"), (2, 1, "best"), (1, 0, "worst"), (1, 1, "worst")]
    assert found[4:] in ([(0, 0, "random"), (0, 1, "random")], [(3, 0, "random"), (3, 1, "random")])
    assert len(chosen(groups, 32)) == 8


def test_a_third_is_random_and_follows_from_the_seed():
    groups = [group(id, [id / 100] * 2) for id in range(60)]
    found = why(groups, 24)
    assert found == why(groups, 24) != why(groups, 24, seed=1)
    assert [[kind for _, _, kind in found].count(kind) for kind in ("best", "worst", "random")] == [8, 8, 8]
    assert {id for id, _, kind in found if kind == "best"} == {59, 58, 57, 56}
    assert {id for id, _, kind in found if kind == "worst"} == {0, 1, 2, 3}


def test_some_of_those_that_failed_are_always_there():
    groups = [group(id, [float(id), 0.5]) for id in range(12)]
    for each in groups[4:8]:
        each.trajectories[1].failure = "timed out"
    found = why(groups, 8)
    assert len(found) == 8 and 0 < sum(kind == "failed" for _, _, kind in found) <= 2
    assert len({(id, sample) for id, sample, _ in found}) == 8


def test_a_group_too_large_for_half_the_rows_shows_its_extremes():
    groups = [group(0, [0.1, 0.9, 0.5, 0.4, 0.6]), group(1, [0.0, -1.0, -2.0, -3.0, -4.0])]
    assert chosen(groups, 4) == [(0, 1), (0, 0), (1, 0), (1, 4)]
    assert chosen(groups[:1], 4) == [(0, 1), (0, 4), (0, 3), (0, 0)]


def test_failures_rank_with_the_worst():
    groups = [group(0, [0.5]), group(1, [None]), group(2, [1.0]), group(3, [float("nan")])]
    assert [id for id, _ in chosen(groups, 2)] == [2, 3]
    assert chosen([group(0, [0.5, None, 1.0])], 2) == [(0, 2), (0, 1)]


def test_no_groups_give_an_empty_file(tmp_path):
    line = write_samples(tmp_path, "train", 1, [])
    assert (tmp_path / line["file"]).read_text() == ""
    assert (line["rows"], line["reward_min"], line["reward_mean"]) == (0, None, None)


def test_a_row_holds_everything_known(tmp_path):
    prompt = Prompt(4, [{"role": "user", "content": "2+2? \ud83d"}], [1], {"answer": 4, "other": 1})
    scored = trajectory(prompt, 1, 0.5, text="vier ½", rewards={"correct": 1.0, "style": float("nan")}, finish="length")
    failed = trajectory(prompt, 2, None, failure="timed out after 10 s")
    scored.advantage = 0.25
    found = sample_rows(20, [Group(prompt, [scored, failed])], task_of=lambda prompt: "sums")
    line = write_samples(tmp_path, "train", 20, found)
    path = tmp_path / line["file"]
    assert line == {
        "step": 20, "kind": "train", "file": "samples/step-20.jsonl", "rows": 2, "bytes": path.stat().st_size, "reward_min": 0.5,
        "reward_mean": 0.5, "reward_max": 0.5, "cut_off": 1, "failed": 1,
    }  # fmt: skip
    assert path == tmp_path / "samples" / "step-20.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert rows[0] == {
        "step": 20,
        "prompt_id": 4,
        "sample": 1,
        "prompt": [{"role": "user", "content": "2+2? \ud83d"}],
        "completion": "vier ½",
        "rewards": {"correct": 1.0, "style": None},
        "reward": 0.5,
        "finish": "length",
        "tokens": 2,
        "failure": None,
        "group_mean": 0.5,
        "group_std": 0.0,
        "advantage": 0.25,
        "answer": "4",
        "task": "sums",
        "prompt_tokens": 1,
        "chosen": "best",
    }
    assert (rows[1]["reward"], rows[1]["failure"], rows[1]["tokens"]) == (None, "timed out after 10 s", 3)


def test_a_repeated_step_replaces_its_file(tmp_path):
    write_samples(tmp_path, "eval", 1, sample_rows(1, [group(0, [0.1, 0.2])]))
    path = tmp_path / write_samples(tmp_path, "eval", 1, sample_rows(1, [group(5, [0.3])]))["file"]
    assert path == tmp_path / "eval/samples/step-1.jsonl"
    assert [json.loads(line)["prompt_id"] for line in path.read_text().splitlines()] == [5]
    assert [p.name for p in path.parent.iterdir()] == ["step-1.jsonl"]
