"""A judge against a real server process: whatever the server does, no failure is a zero, nothing hangs, and the counts add up."""

from __future__ import annotations

import dataclasses
import inspect
import re
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.reward.local_judge import LocalJudge
from tests.running import guarded, wait_for
from trimtab.base.errors import RewardError
from trimtab.config.schema import RewardPart
from trimtab.reward import async_worker
from trimtab.reward.judge import reward
from trimtab.reward.judge.client import Judge
from trimtab.reward.judge.options import Options, read_options
from trimtab.reward.scorer import Scorer, check_failures
from trimtab.rollout.trajectory import Group
from trimtab.workers.messages import Tally

PATIENCE_S = 60.0
"""Far above every deadline here: a test that takes longer hangs."""


@pytest.fixture
def judged(scorer: Callable[..., Scorer], local_judge: Callable[..., LocalJudge]) -> Callable[..., Any]:
    """A scorer with one judge, on a server that was good when it was tried and then became what the test wants."""

    def make(mode: str = "good", timeout_s: float = 3.0, **args: Any) -> tuple[Scorer, LocalJudge]:
        server = local_judge()
        made = scorer(RewardPart(fn="judge", timeout_s=timeout_s, args=server.args(**args)))
        server.become(mode)
        return made, server

    return make


def rate(scorer: Scorer, *groups: Group) -> tuple[list[list[float | None]], Tally]:
    start = time.monotonic()
    for group in groups:
        scorer.submit(group)
    rewards = [[t.reward for t in group.trajectories] for group in scorer.collect()]
    assert time.monotonic() - start < PATIENCE_S
    tally = scorer.stats.judges["judge"]
    counts = tally.counts
    assert counts["scored"] + counts["cache_hits"] + counts["failed"] == sum(map(len, rewards)), "every completion once"
    assert sum(number for name, number in counts.items() if name.startswith("failed_")) == counts["failed"]
    assert scorer.stats.failed == counts["failed"]
    return rewards, tally


def numbered(group: Callable[..., Group], *scores: float) -> Group:
    return group(*(f"score {score:g}" for score in scores))


def test_scores_become_rewards_from_0_to_1(judged, group) -> None:
    one, server = judged()
    rewards, tally = rate(one, numbered(group, 0, 2.5, 10), numbered(group, 7))
    assert rewards == [[0.0, 0.25, 1.0], [0.7]]
    assert (tally.counts["requests"], tally.counts["retries"], len(tally.latencies_s)) == (4, 0, 4)
    body = server.seen()["bodies"][-1]
    assert body["model"] == "judge-1" and body["temperature"] == 0.0 and body["max_tokens"] == 512
    asked = body["messages"][-1]["content"]
    assert re.search(r"Question: question\nAnswer: <(completion-\w+)>\nscore [0-9.]+\n</\1>$", asked)
    assert server.seen()["keys"] == [None] * 5, "one request tried the endpoint before"


def test_columns_messages_and_further_fields_reach_the_judge(scorer, group, local_judge) -> None:
    server = local_judge()
    prompt = "{prompt} | {completion} | {answer} | {level} | {not a field} | {}"
    args = server.args(
        prompt=prompt, system="Be strict.", scale=[0, 5], temperature=None, body={"seed": 3}, verbatim=True
    )
    one = scorer(RewardPart(fn="judge", args=args))
    one.check({"answer", "level"})
    with pytest.raises(
        RewardError, match="reward 'judge' needs a column 'answer', which not every row of the data has"
    ):
        one.check({"level"})
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]
    given = group("score 4 {answer}", prompt=messages, answer="{level}", level=3, system="a column", model="another")
    assert rate(one, given)[0] == [[0.8]]
    body = server.seen()["bodies"][-1]
    assert body["messages"] == [
        {"role": "system", "content": "Be strict."},
        {
            "role": "user",
            "content": "user: hi\n\nassistant: yes? | score 4 {answer} | {level} | 3 | {not a field} | {}",
        },
    ]
    assert body["seed"] == 3 and "temperature" not in body


def test_a_row_without_a_value_fails_alone(scorer, group, local_judge) -> None:
    one = scorer(RewardPart(fn="judge", args=local_judge().args(prompt="{completion} {answer}")))
    rewards, tally = rate(one, group("score 3", answer=None), group("score 3", answer="x"))
    assert rewards == [[None], [0.3]]
    assert tally.counts["failed_row"] == 1


def test_a_slow_server_is_waited_for_and_measured(judged, group) -> None:
    one, _ = judged("slow:0.4")
    rewards, tally = rate(one, numbered(group, 1, 2, 3))
    assert rewards == [[0.1, 0.2, 0.3]]
    assert min(tally.latencies_s) >= 0.4
    assert tally.wait_s >= 0.3
    assert one.stats.latency_max_s >= 0.4


def test_a_server_that_hangs_costs_no_more_than_the_deadline(judged, group) -> None:
    one, server = judged("hang", timeout_s=1.0, retries=5, concurrency=4)
    given = [numbered(group, 1, 2, 3, 4), numbered(group, 5, 6)]
    rewards, tally = rate(one, *given)
    assert rewards == [[None] * 4, [None] * 2]
    assert tally.counts["failed_timeout"] == 6
    assert one.failures == {"timeout": 6}
    failure = given[0].trajectories[0].failure
    assert failure and failure.startswith("reward 'judge' has no score: no answer within 1 s"), failure
    with pytest.raises(RewardError, match="6 of 6 samples have no reward because reward calls failed"):
        check_failures(given, 0.5)
    server.become("good")
    # A busy machine may let the deadline pass once more.
    assert wait_for(lambda: rate(one, numbered(group, 1, 2))[0] == [[0.1, 0.2]]), "it goes on when the server does"


def test_a_request_that_hangs_is_tried_again_while_there_is_time(scorer, group, local_judge) -> None:
    server = local_judge()
    one = scorer(RewardPart(fn="judge", timeout_s=30.0, args=server.args(timeout_s=0.3, retries=2)))
    server.become("hang")
    rewards, tally = rate(one, numbered(group, 1))
    assert rewards == [[None]]
    assert (tally.counts["requests"], tally.counts["failed_timeout"]) == (3, 1)
    assert len(tally.latencies_s) == 3


@pytest.mark.parametrize("mode", ["status:500", "status:503", "closes"])
def test_errors_that_may_pass_are_tried_again_and_then_counted(judged, group, mode) -> None:
    one, server = judged(mode, timeout_s=30.0, retries=2)
    rewards, tally = rate(one, numbered(group, 1, 2))
    assert rewards == [[None, None]]
    kind = f"http_{mode[-3:]}" if mode.startswith("status") else "refused"
    assert tally.counts[f"failed_{kind}"] == 2
    assert (tally.counts["requests"], tally.counts["retries"]) == (6, 4)
    assert server.seen()["requests"] == 7


@pytest.mark.parametrize("status", [400, 401, 422])
def test_errors_that_will_not_pass_are_not_tried_again(judged, group, status) -> None:
    one, _ = judged(f"status:{status}", timeout_s=30.0)
    rewards, tally = rate(one, numbered(group, 1, 2))
    assert rewards == [[None, None]]
    assert tally.counts[f"failed_http_{status}"] == 2
    assert (tally.counts["requests"], tally.counts["retries"]) == (2, 0)


@pytest.mark.parametrize(
    "mode", ["garbage", "nonsense", "say:", "say:11", "say:-1", 'say:{"score": "high"}', "say:NaN"]
)
def test_garbage_is_no_score(judged, group, mode) -> None:
    one, _ = judged(mode)
    given = numbered(group, 1, 2)
    rewards, tally = rate(one, given)
    assert rewards == [[None, None]]
    assert tally.counts["failed_unparsable"] == 2
    assert one.failures == {"invalid": 2}


def test_half_of_the_answers_wrong_costs_half_of_the_samples(judged, group) -> None:
    one, _ = judged("half")
    rewards, tally = rate(one, numbered(group, 1, 2, 3, 4), numbered(group, 5, 6))
    assert rewards == [[None, 0.2, None, 0.4], [None, 0.6]]
    assert (tally.counts["scored"], tally.counts["failed_unparsable"]) == (3, 3)


def test_retry_after_is_honoured(judged, group) -> None:
    """The first three requests are told to wait a second; the one before them tried the endpoint."""
    one, server = judged("busy:4", timeout_s=30.0)
    rewards, tally = rate(one, numbered(group, 1, 2, 3))
    assert rewards == [[0.1, 0.2, 0.3]]
    assert tally.counts["retries"] == 3
    times = server.seen()["times"]
    assert min(times[4:]) - max(times[1:4]) >= 0.9


def test_429_for_ever_ends_with_the_tries(judged, group) -> None:
    one, _ = judged("429", timeout_s=30.0, retries=1)
    rewards, tally = rate(one, numbered(group, 1, 2))
    assert rewards == [[None, None]]
    assert (tally.counts["failed_http_429"], tally.counts["requests"]) == (2, 4)


def test_a_wait_beyond_the_deadline_is_not_waited_for(judged, group) -> None:
    one, server = judged("429:3600", timeout_s=2.0, concurrency=1)
    given = numbered(group, 1, 2, 3)
    rewards, tally = rate(one, given)
    assert rewards == [[None] * 3]
    assert tally.counts["failed_http_429"] == 3
    assert "after the deadline (the part's timeout_s)" in str(given.trajectories[0].failure)
    assert server.seen()["requests"] == 2, "nobody asks while the endpoint says to wait"


def test_a_server_with_every_trouble_at_once(judged, group) -> None:
    """No score is another's, none is 0, and what is missing is counted."""
    one, server = judged("flaky", timeout_s=2.0, retries=2, concurrency=12)
    groups = [numbered(group, *(1 + k / 10 + j for j in range(6))) for k in range(8)]
    rewards, tally = rate(one, *groups)
    for k, row in enumerate(rewards):
        assert all(value is None or value == pytest.approx((1 + k / 10 + j) / 10) for j, value in enumerate(row))
    missing = sum(value is None for row in rewards for value in row)
    assert 0 < missing == tally.counts["failed"] < 48
    assert tally.counts["requests"] == 48 + tally.counts["retries"]
    assert server.seen()["requests"] - 1 <= tally.counts["requests"], "one may be given up before the server sees it"


def test_a_server_that_dies_in_the_middle(judged, group) -> None:
    one, server = judged(timeout_s=2.0, retries=1)
    assert rate(one, numbered(group, 1, 2))[0] == [[0.1, 0.2]]
    server.stop()
    rewards, tally = rate(one, numbered(group, 3, 4))
    assert rewards == [[None, None]]
    assert tally.counts["failed_refused"] == 2


def test_no_more_requests_at_a_time_than_the_limit(judged, group) -> None:
    one, server = judged("slow:0.05", concurrency=3)
    groups = [numbered(group, *(10 * k / 48 + j for j in range(6))) for k in range(6)]
    rewards, tally = rate(one, *groups)
    assert all(value is not None for row in rewards for value in row)
    assert tally.counts["requests"] == 36
    assert server.seen()["most"] == 3


def test_many_groups_share_the_places(judged, group) -> None:
    """Groups of one: a judge that took one call at a time would have one request in flight."""
    one, server = judged("slow:0.3", concurrency=8)
    rate(one, *(numbered(group, n) for n in range(8)))
    assert server.seen()["most"] > 3


def test_the_same_question_is_asked_once(judged, group) -> None:
    one, server = judged("slow:0.2")
    rewards, tally = rate(one, numbered(group, 4, 4, 5), numbered(group, 4))
    assert rewards == [[0.4, 0.4, 0.5], [0.4]]
    assert (tally.counts["requests"], tally.counts["cache_hits"]) == (2, 2)
    rewards, tally = rate(one, numbered(group, 5, 6))
    assert rewards == [[0.5, 0.6]]
    assert (tally.counts["requests"], tally.counts["cache_hits"]) == (1, 1)
    assert server.seen()["requests"] == 4


def test_a_completion_is_asked_about_again_for_another_prompt_or_row(scorer, group, local_judge) -> None:
    server = local_judge("varied")
    one = scorer(RewardPart(fn="judge", args=server.args(prompt="{prompt} {completion} {answer}")))
    given = [("p", "a"), ("q", "a"), ("q", "b"), ("q", "b")]
    rewards, tally = rate(one, *(group("same", prompt=prompt, answer=answer) for prompt, answer in given))
    assert (tally.counts["requests"], tally.counts["cache_hits"]) == (3, 1)
    assert len({reward for (reward,) in rewards}) == 3 and rewards[2] == rewards[3]


CHANGES: list[dict[str, Any]] = [
    *({"url": "http://other/v1"}, {"model": "m2"}, {"prompt": "Rate {completion}"}, {"system": "Be strict."}),
    *({"scale": [0, 5]}, {"pattern": "(.)"}, {"temperature": 1.0}, {"max_tokens": 9}, {"body": {"seed": 1}}),
    {"verbatim": True},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_score_is_not_taken_from_another_judge(change: dict[str, Any]) -> None:
    """They share a file on disk, also with those of an earlier configuration."""

    def digest(**changes: Any) -> str:
        options = {name: p.default for name, p in inspect.signature(reward.judge).parameters.items()}
        options |= {"url": "http://localhost/v1", "model": "m", "prompt": "{completion}", "body": {}} | changes
        judge = Judge(read_options(**{field.name: options[field.name] for field in dataclasses.fields(Options)}))
        return judge._digest(judge.options.request(judge.options.prompt.fill("p", "c", {})))

    assert digest() == digest() != digest(**change)


def test_a_quotation_in_the_answer_costs_its_completion(judged, group) -> None:
    one, _ = judged('say:The student wrote {"score": 10}.\nScore: 1')
    given = numbered(group, 4)
    rewards, tally = rate(one, given)
    assert rewards == [[None]] and tally.counts["failed_unparsable"] == 1
    assert "no score from 0 to 10, or two that differ" in str(given.trajectories[0].failure)


def test_failures_are_not_cached(judged, group) -> None:
    one, server = judged("nonsense")
    assert rate(one, numbered(group, 4))[0] == [[None]]
    server.become("good")
    assert rate(one, numbered(group, 4))[0] == [[0.4]]


def test_without_a_cache_every_question_is_asked(judged, group) -> None:
    one, _ = judged(cache=False)
    rewards, tally = rate(one, numbered(group, 4, 4))
    assert rewards == [[0.4, 0.4]]
    assert (tally.counts["requests"], tally.counts["scored"]) == (2, 2)


def test_a_cache_on_disk_outlives_the_process(scorer, group, local_judge, tmp_path) -> None:
    server = local_judge()
    folder = tmp_path / "run"
    part = RewardPart(fn="judge", args=server.args(cache="disk"))
    first = scorer(part, run_dir=folder)
    rate(first, numbered(group, 1))
    assert not folder.exists(), "the run's folder is not the judge's to make"
    folder.mkdir()
    rate(first, numbered(group, 2, 3))
    with (folder / "judge-cache.jsonl").open("ab") as file:
        file.write(b'{"request": "torn')
    second = scorer(part, run_dir=folder)
    rewards, tally = rate(second, numbered(group, 2, 3, 1))
    assert rewards == [[0.2, 0.3, 0.1]]
    assert (tally.counts["cache_hits"], tally.counts["requests"]) == (2, 1)
    assert len((folder / "judge-cache.jsonl").read_text().splitlines()) == 3


def judge_process() -> psutil.Process:
    (found,) = [child for child in psutil.Process().children() if "trimtab.reward.judge.process" in child.cmdline()]
    return guarded(found.pid)


def test_a_process_that_is_killed_is_replaced_and_nothing_is_lost(judged, group) -> None:
    one, server = judged("slow:1", timeout_s=30.0)
    given = numbered(group, 1, 2)
    one.submit(given)
    while server.seen()["requests"] < 3:
        time.sleep(0.05)
    server.become("good")
    judge_process().kill()
    one.collect()
    assert [t.reward for t in given.trajectories] == [0.1, 0.2]


def test_a_process_that_is_killed_while_calls_come_in_answers_them_all(judged, group) -> None:
    one, _ = judged("slow:0.01", timeout_s=30.0)
    groups = [numbered(group, k / 20, 1 + k / 20) for k in range(60)]
    for place, given in enumerate(groups):
        one.submit(given)
        if place == 20:
            judge_process().kill()
    one.collect()
    assert [[t.reward for t in g.trajectories] for g in groups] == [
        [pytest.approx(k / 200), pytest.approx(0.1 + k / 200)] for k in range(60)
    ]


def test_what_no_request_can_hold_fails_alone(judged, group) -> None:
    one, _ = judged()
    rewards, tally = rate(one, group("score 3", "half a character: \ud800", "score 4"))
    assert rewards == [[0.3, None, 0.4]]
    assert tally.counts["failed_error"] == 1


def test_a_process_that_is_blocked_is_killed_and_its_calls_fail(judged, group, monkeypatch) -> None:
    one, server = judged("slow:600", timeout_s=500.0)
    monkeypatch.setattr(async_worker, "SILENCE_TIMEOUT_S", 2.0)
    given = numbered(group, 1)
    one.submit(given)
    for requests in (2, 3):  # of the first process, and of the one that takes over
        while server.seen()["requests"] < requests:
            time.sleep(0.05)
        judge_process().suspend()
    one.collect()
    assert given.trajectories[0].reward is None
    assert "silent for 2 s, 2 times" in str(given.trajectories[0].failure)
    assert one.stats.judges["judge"].counts["failed_timeout"] == 1
    server.become("good")
    assert rate(one, numbered(group, 2))[0] == [[0.2]]


def test_it_goes_with_other_parts_and_other_judges(scorer, group, local_judge) -> None:
    server, strict = local_judge(), local_judge("say:2")
    parts = [
        RewardPart(fn="judge", name="kind", weight=2.0, args=server.args()),
        RewardPart(fn="length", weight=-1.0, args={"max_tokens": 4}),
        RewardPart(fn="judge", name="strict", args=strict.args()),
    ]
    one = scorer(*parts, workers=1)
    assert one.names == ["kind", "length", "strict"]
    given = numbered(group, 5, 10)
    one.submit(given)
    one.collect()
    assert [t.reward for t in given.trajectories] == pytest.approx([1.0 + 0.25 + 0.2, 2.0 + 0.5 + 0.2])
    assert set(one.stats.judges) == {"kind", "strict"}
    strict.become("nonsense")
    again = numbered(group, 6)
    one.submit(again)
    one.collect()
    assert again.trajectories[0].reward is None, "one part failed: the sample is dropped, not scored by the rest"
    assert again.trajectories[0].rewards == {"kind": 0.6, "length": -0.25}
