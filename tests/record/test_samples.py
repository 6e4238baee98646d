"""Sample files show both ends of a batch, whole groups first, and everything known about a completion."""

import json

import torch

from trimtab.data.prompt import Prompt
from trimtab.record.samples import choose_samples, write_samples
from trimtab.rollout.trajectory import Group, Trajectory


def trajectory(prompt, sample, reward, **fields):
    tokens = torch.zeros(sample + 1, dtype=torch.int64)
    fields = {"finish": "stop", "text": f"text {sample}"} | fields
    return Trajectory(prompt, sample, tokens, tokens.float(), tokens.int(), reward=reward, **fields)


def group(id, rewards):
    prompt = Prompt(id, f"prompt {id}", [1, 2])
    return Group(prompt, [trajectory(prompt, i, reward) for i, reward in enumerate(rewards)])


def chosen(groups, max_rows):
    return [(t.prompt.id, t.sample) for t in choose_samples(groups, max_rows)]


def test_best_then_worst_then_inward_in_whole_groups():
    groups = [group(0, [0.5, 0.5]), group(1, [0.0, 0.1]), group(2, [1.0, 0.9]), group(3, [0.2, 0.3])]
    assert chosen(groups, 7) == [(2, 0), (2, 1), (1, 0), (1, 1), (0, 0), (0, 1)]
    assert len(chosen(groups, 32)) == 8


def test_a_group_too_large_for_half_the_rows_shows_its_extremes():
    groups = [group(0, [0.1, 0.9, 0.5, 0.4, 0.6]), group(1, [0.0, -1.0, -2.0, -3.0, -4.0])]
    assert chosen(groups, 4) == [(0, 1), (0, 0), (1, 0), (1, 4)]
    assert chosen(groups[:1], 4) == [(0, 1), (0, 4), (0, 3), (0, 0)]


def test_failures_rank_with_the_worst():
    groups = [group(0, [0.5]), group(1, [None]), group(2, [1.0]), group(3, [float("nan")])]
    assert [id for id, _ in chosen(groups, 2)] == [2, 3]
    assert chosen([group(0, [0.5, None, 1.0])], 2) == [(0, 2), (0, 1)]


def test_no_groups_give_an_empty_file(tmp_path):
    assert write_samples(tmp_path, 1, []).read_text() == ""


def test_a_row_holds_everything_known(tmp_path):
    prompt = Prompt(4, [{"role": "user", "content": "2+2? \ud83d"}], [1])
    scored = trajectory(prompt, 1, 0.5, text="vier ½", rewards={"correct": 1.0, "style": float("nan")}, finish="length")
    failed = trajectory(prompt, 2, None, failure="timed out after 10 s")
    path = write_samples(tmp_path, 20, [Group(prompt, [scored, failed])])
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
    }
    assert (rows[1]["reward"], rows[1]["failure"], rows[1]["tokens"]) == (None, "timed out after 10 s", 3)


def test_a_repeated_step_replaces_its_file(tmp_path):
    write_samples(tmp_path, 1, [group(0, [0.1, 0.2])])
    path = write_samples(tmp_path, 1, [group(5, [0.3])])
    assert [json.loads(line)["prompt_id"] for line in path.read_text().splitlines()] == [5]
    assert [p.name for p in path.parent.iterdir()] == ["step-1.jsonl"]
