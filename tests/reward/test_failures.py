"""Whatever a reward function does, it costs only its own sample, and leaves no process behind."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from tests.reward.misbehave import CHILDREN
from tests.running import left
from trimtab.config.schema import RewardPart
from trimtab.reward.worker import checked_entry
from trimtab.workers.messages import Failure

HANGS = ["sleep_forever", "busy_loop", "ignore_sigterm", "hang_with_children", "stop_itself"]
CRASHES = {
    "exit_at_once": "exit status 7",
    "segfault": "SIGSEGV",
    "killed_by_system": "SIGKILL",
    "end_with_children": "SIGKILL",
    "die_and_leave_the_channel_open": "exit status 1",
}
RAISES = {
    "raise_error": "ValueError: the judge is out",
    "raise_without_words": "Unspeakable: its message cannot be shown",
    "exit_politely": "SystemExit: 3",
    "word": "could not convert",
}
GUARDIANS = 2
"""Of each worker."""
INVALID = {"nan": "nan", "inf": "inf", "string": "str '1.0'", "list": "list", "too_few": "0 values for 1"}


def run(scorer, *groups):
    for group in groups:
        scorer.submit(group)
    scorer.collect()


def assert_only_the_culprit_is_dropped(scorer, group, misdeed, kind, words):
    healthy = [group(str(i), str(i + 1)) for i in range(20)]
    guilty = group("1", misdeed, "3")
    run(scorer, healthy[0], guilty, *healthy[1:])
    for i, one in enumerate(healthy):
        assert [t.reward for t in one.trajectories] == [i, i + 1]
    first, culprit, third = guilty.trajectories
    assert (first.reward, third.reward) == (1.0, 3.0)
    assert (culprit.reward, culprit.rewards) == (None, {})
    assert words in culprit.failure
    assert culprit.failure.startswith("reward 'score' ")
    assert scorer.failures == {kind: 1}
    assert (scorer.stats.failed, scorer.stats.not_applicable) == (1, 0)


@pytest.mark.parametrize("misdeed", HANGS)
def test_a_hung_call_is_killed_at_its_deadline(scorer, group, misdeed):
    one = scorer("score", timeout_s=0.5)
    assert_only_the_culprit_is_dropped(one, group, misdeed, "timeout", "took longer than 0.5 s")
    assert one.stats.latency_max_s < 20


def test_a_timeout_says_where_it_hung(scorer, group):
    given = group("sleep_forever")
    run(scorer("score", timeout_s=0.5), given)
    assert "in sleep_forever" in given.trajectories[0].failure


@pytest.mark.parametrize("misdeed", CRASHES)
def test_a_crash_is_a_failure_with_its_reason(scorer, group, misdeed):
    one = scorer("score", timeout_s=1000)  # a crash is noticed by itself, not at the deadline
    assert_only_the_culprit_is_dropped(one, group, misdeed, "crashed", CRASHES[misdeed])


@pytest.mark.parametrize("misdeed", RAISES)
def test_a_raise_is_a_failure_with_its_traceback(scorer, group, misdeed):
    one = scorer("score")
    assert_only_the_culprit_is_dropped(one, group, misdeed, "raised", RAISES[misdeed])


@pytest.mark.parametrize("misdeed", INVALID)
def test_an_invalid_answer_is_a_failure(scorer, group, misdeed):
    one = scorer("score")
    assert_only_the_culprit_is_dropped(one, group, misdeed, "invalid", INVALID[misdeed])
    assert one.stats.repeated == (misdeed == "too_few")


def test_what_is_no_list_is_a_failure(scorer, group):
    given = group("1", "2")
    run(scorer(RewardPart(fn="object:f"), functions={"f": lambda completions: 1.0}), given)
    assert all("returned float; return a list" in t.failure for t in given.trajectories)


def test_a_failed_part_drops_the_sample_but_keeps_the_other_parts_value(scorer, group):
    given = group("raise_error", "2")
    run(scorer("length", "score"), given)
    assert [t.reward for t in given.trajectories] == [None, 3.0]
    assert given.trajectories[0].rewards == {"length": 11.0}


def test_many_hung_calls_do_not_block_healthy_groups(scorer, group):
    """All workers hang at once, again and again: groups are still served between, and every sample is accounted for."""
    one = scorer("score", workers=2, timeout_s=0.5)
    hung = [group("sleep_forever", "1") for _ in range(4)]
    fine = [group("2", "3") for _ in range(20)]
    run(one, *hung, *fine)
    assert [[t.reward for t in g.trajectories] for g in hung] == [[None, 1.0]] * 4
    assert [[t.reward for t in g.trajectories] for g in fine] == [[2.0, 3.0]] * 20
    assert one.failures == {"timeout": 4}


def test_first_calls_go_before_repeated_ones(scorer, group):
    """With one worker, a healthy group waits for the hung call alone, not for the repeated ones after it."""
    one = scorer("score", workers=1, timeout_s=0.5)
    hung, fine = group("sleep_forever", "sleep_forever", "sleep_forever"), group("1")
    one.submit(hung)
    one.submit(fine)
    sheet = one._scored[1]
    assert sheet.done.wait(30)
    assert not one._scored[0].done.is_set()
    one.collect()


def test_time_in_the_queue_does_not_count(scorer, group):
    part = RewardPart(fn="object:slow", timeout_s=1.0)

    def slow(completions):
        time.sleep(0.15)
        return [1.0] * len(completions)

    groups = [group("a") for _ in range(10)]
    run(scorer(part, workers=1, functions={"slow": slow}), *groups)
    assert all(g.trajectories[0].reward == 1.0 for g in groups)


@pytest.mark.parametrize("fn", ["fork_and_return", "fork_and_stay", "leave_children"])
def test_a_forked_child_never_answers_and_is_gone_after_close(scorer, group, fn):
    one = scorer(fn)
    groups = [group("a", "b") for _ in range(5)]
    run(one, *groups)
    assert [[t.reward for t in g.trajectories] for g in groups] == [[1.0, 1.0]] * 5


def test_a_worker_that_dies_between_calls_fails_nobody(scorer, group):
    others = set(psutil.Process().children())
    one = scorer("die_afterwards", workers=1)
    for _ in range(3):
        given = group("a")
        run(one, given)
        assert given.trajectories[0].reward == 1.0
        assert not left(set(psutil.Process().children()) - others)


def test_close_in_the_middle_of_calls_leaves_no_process(scorer, group):
    others = len(psutil.Process().children(recursive=True))  # of tests before this one
    one = scorer("score", timeout_s=1000, workers=3)
    for _ in range(6):
        one.submit(group("hang_with_children"))
    start = time.monotonic()
    wanted = others + 3 * (GUARDIANS + 1 + CHILDREN)
    while len(psutil.Process().children(recursive=True)) != wanted and time.monotonic() < start + 30:
        time.sleep(0.05)
    assert len(psutil.Process().children(recursive=True)) == wanted


PARENT = """
    import sys
    from array import array
    from pathlib import Path
    from types import SimpleNamespace
    from trimtab.config.schema import RewardPart
    from trimtab.data.prompt import Prompt
    from trimtab.reward.scorer import Scorer

    prompt = Prompt(0, "q", [1])
    scorer = Scorer([RewardPart(fn="misbehave.py:score", timeout_s=1000)], workers=3, base_dir=Path(sys.argv[1]))
    for text in ("hang_with_children", "busy_loop"):  # the third worker stays idle
        # no torch: it takes seconds to import
        trajectory = SimpleNamespace(text=text, tokens=array("l", [1]), failure=None, policy_mask=None, conversation=None)
        scorer.submit(SimpleNamespace(prompt=prompt, trajectories=[trajectory]))
    print("ready", flush=True)
    sys.stdin.readline()
"""


def start_parent() -> subprocess.Popen[str]:
    """A trainer that ends without closing its scorer, at a newline or when it is killed."""
    command = [sys.executable, "-c", textwrap.dedent(PARENT), str(Path(__file__).parent)]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    return parent


def workers_of(parent: subprocess.Popen[str]) -> list[psutil.Process]:
    deadline = time.monotonic() + 30
    wanted = 3 * (GUARDIANS + 1) + CHILDREN
    while len(found := psutil.Process(parent.pid).children(recursive=True)) != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(found) == wanted
    return found


def test_workers_die_with_a_killed_parent_even_when_hung():
    parent = start_parent()
    try:
        workers = workers_of(parent)
    finally:
        parent.kill()
        parent.communicate(timeout=30)
    assert not left(workers)


def test_workers_end_with_a_parent_that_exits_without_closing():
    parent = start_parent()
    try:
        workers = workers_of(parent)
        parent.communicate("\n", timeout=60)
        assert parent.returncode == 0
    finally:
        parent.kill()
        parent.communicate(timeout=30)
    assert not left(workers)


def test_one_value_for_a_whole_group_is_nobodys(scorer, group):
    """Asked again for each sample alone, it would pass for right."""
    one, given = scorer("one_for_all"), group("1", "2", "3")
    one.submit(given)
    one.collect()
    assert all("returned 1 values for 3 completions" in (t.failure or "") for t in given.trajectories)
    assert (one.stats.failed, one.stats.repeated) == (3, 1)


@pytest.mark.parametrize(("value", "words"), [(10**400, "inf"), (1e300, "float32"), (-3.5e38, "float32")])
def test_rewards_that_nothing_can_be_computed_with_are_failures(value, words):
    found = checked_entry(value)
    assert isinstance(found, Failure) and found.kind == "invalid" and words in found.summary
    assert checked_entry(3e38) == 3e38


def test_a_long_message_is_cut(scorer, group):
    given = group("1", "raise_at_length")
    run(scorer("score"), given)
    first, culprit = given.trajectories
    assert first.reward == 1.0 and culprit.failure is not None
    assert len(culprit.failure) < 5_000
    assert culprit.failure.startswith("reward 'score' raised ValueError: xxx") and culprit.failure.endswith("x the end")
    assert "in raise_at_length" in culprit.failure and "characters left out" in culprit.failure


@pytest.mark.parametrize("length", [4_000, 4_001, 20_000_000])
def test_failures_hold_so_much_and_no_more(length):
    text = "a" * (length - 1) + "z"
    failure = Failure("raised", text, text)
    for kept in (failure.summary, failure.detail):
        assert kept == text if length <= 4_000 else len(kept) < 4_100 and kept[0] == "a" and kept[-1] == "z"
    assert str(failure) == f"{failure.summary}\n{failure.detail}"
