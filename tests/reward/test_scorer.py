"""Groups in, rewards out: values, weights, arguments, and what becomes of None."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest

from trimtab.base.errors import RewardError
from trimtab.config.schema import RewardPart
from trimtab.reward.scorer import Scorer, check_failures


def scored(scorer, *groups):
    for group in groups:
        scorer.submit(group)
    return [[t.reward for t in group.trajectories] for group in scorer.collect()]


def test_groups_come_back_in_submission_order_with_their_own_values(scorer, group):
    groups = [group(str(i), str(i + 0.5)) for i in range(50)]
    one = scorer("score")
    assert scored(one, *groups) == [[i, i + 0.5] for i in range(50)]
    assert one.collect() == []
    assert scored(one, group("7")) == [[7.0]]


def test_parts_are_weighted_and_reported_by_name(scorer, group):
    parts = [
        RewardPart(fn="misbehave.py:score", weight=2.0),
        RewardPart(fn="misbehave.py:length", name="size", weight=-1),
    ]
    one = scorer(*parts)
    assert one.names == ["score", "size"]
    assert scored(one, group("10", "4")) == [[18.0, 7.0]]
    assert one.stats.parts["score"].mean == 7.0
    assert one.stats.parts["score"].std == 3.0
    assert one.stats.parts["size"].mean == 1.5
    assert (one.stats.failed, one.stats.not_applicable, one.stats.calls, one.stats.repeated) == (0, 0, 2, 0)
    assert one.stats.latency_max_s > 0


def test_none_leaves_a_part_out_and_no_part_at_all_is_counted_not_failed(scorer, group):
    one = scorer("even_only", "length")
    assert scored(one, group("2", "3")) == [[2.0, 1.0]]
    assert one.stats.parts["even_only"].count == 1
    only = scorer("even_only")
    given = group("2", "3")
    assert scored(only, given) == [[1.0, None]]
    assert given.trajectories[1].failure is None
    assert given.trajectories[1].rewards == {}
    assert (only.stats.not_applicable, only.stats.failed) == (1, 0)
    check_failures([given], 0.0)


def test_a_function_gets_the_field_convention(scorer, group):
    given = group("a", "b", answer="42", level=3)
    one = scorer("echo")
    one.submit(given)
    one.collect()
    # A repeated call, because the group's failed: lists of one.
    assert repr((["question"], ["b"], [[0, 1]], [("answer", ["42"]), ("level", [3])])) in given.trajectories[1].failure


def test_conversational_prompts_have_conversational_completions(scorer, group):
    messages = [{"role": "user", "content": "hi"}]
    given = group("hello", prompt=messages)
    one = scorer("echo")
    one.submit(given)
    one.collect()
    assert repr(([messages], [[{"role": "assistant", "content": "hello"}]], [[0]], [])) in given.trajectories[0].failure


def test_functions_get_only_the_arguments_that_they_name_and_args(scorer, group):
    one = scorer(RewardPart(fn="misbehave.py:gold_only", args={"scale": 10.0}))
    assert scored(one, group("a", "b", answer="2", other="ignored")) == [[20.0, 20.0]]


@pytest.mark.parametrize("fn", ["eventually", "as_array", "as_scalars"])
def test_async_functions_arrays_and_scalars_of_other_libraries(scorer, group, fn):
    assert scored(scorer(fn), group("0", "1", "1", "0"), group("1")) == [[0.0, 1.0, 1.0, 0.0], [1.0]]


def test_python_objects_lambdas_and_closures(scorer, group):
    bonus = 5.0
    parts = [RewardPart(fn="object:shout"), RewardPart(fn="object:flat")]
    functions = {
        "shout": lambda completions, **_: [float(len(c)) for c in completions],
        "flat": lambda completions: [bonus] * len(completions),
    }
    one = scorer(*parts, functions=functions)
    assert one.names == ["shout", "flat"]
    assert scored(one, group("abc", "a")) == [[8.0, 6.0]]


def test_functions_by_import_path(scorer, group):
    assert scored(scorer(RewardPart(fn="misbehave:score")), group("3")) == [[3.0]]


def test_prints_and_raw_writes_do_not_disturb_the_answers(scorer, group):
    assert scored(scorer("noisy"), *[group("1", "2") for _ in range(5)]) == [[1.0, 1.0]] * 5


def test_large_arguments_pass(scorer, group):
    assert scored(scorer("length"), group("x" * 3_000_000, image=b"y" * 3_000_000)) == [[3e6]]


def test_workers_import_neither_torch_nor_pydantic_and_use_one_thread(scorer, group):
    assert scored(scorer("modules"), group("1")) == [[0.0]]
    assert scored(scorer("threads"), group("1")) == [[1.0]]


def test_an_empty_group_is_done_at_once(scorer, group):
    assert scored(scorer("score"), group()) == [[]]


def test_columns_are_checked_before_training(scorer):
    one = scorer("gold_only", RewardPart(fn="number_match", args={"column": "solution"}))
    one.check(["answer", "solution"])
    with pytest.raises(RewardError, match=r"'gold_only' needs a column 'answer'.*Did you mean 'answers'"):
        one.check(["answers", "solution"])
    with pytest.raises(RewardError, match="'number_match' needs a column 'solution'"):
        one.check(["answer"])


def test_failures_above_the_fraction_stop_the_run_with_the_first_traceback(scorer, group):
    groups = [group("1", "raise_error", "3", "4"), group("1", "2", "3", "4")]
    one = scorer("score")
    assert scored(one, *groups) == [[1.0, None, 3.0, 4.0], [1.0, 2.0, 3.0, 4.0]]
    check_failures(groups, 0.125)
    with pytest.raises(RewardError) as caught:
        check_failures(groups, 0.12)
    message = str(caught.value)
    assert "1 of 8 samples" in message
    assert "reward 'score' raised ValueError: the judge is out" in message
    assert 'misbehave.py", line' in message
    assert "in raise_error" in message
    assert "worker.py" not in message
    check_failures([], 0.0)


def test_close_is_final_and_an_abandoned_scorer_closes_itself(scorer, group):
    one = scorer("score")
    one.close()
    one.close()
    with pytest.raises(RuntimeError, match="closed"):
        one.submit(group("1"))
    before = len(psutil.Process().children(recursive=True))
    abandoned = Scorer([RewardPart(fn="length", args={"max_tokens": 5})], workers=2, base_dir=Path())
    assert len(psutil.Process().children(recursive=True)) > before
    del abandoned
    gc.collect()
    assert len(psutil.Process().children(recursive=True)) == before


def test_no_part_can_take_the_place_of_a_metric(scorer):
    with pytest.raises(RewardError, match="a part cannot be called 'mean'"):
        scorer(RewardPart(fn="misbehave.py:score", name="mean"))


def test_what_a_function_changes_is_one_samples_own(scorer, group):
    def first_test(tests, prompts, **columns):  # type: ignore[no-untyped-def]
        for messages in prompts:
            messages.append({"role": "user", "content": "more"})
        return [10 * test.pop(0) + len(messages) for test, messages in zip(tests, prompts)]

    one = scorer(RewardPart(fn="object:first_test"), functions={"first_test": first_test})
    asked = [{"role": "user", "content": "q"}]
    assert scored(one, group("a", "b", "c", prompt=asked, tests=[1, 2, 3])) == [[12.0, 12.0, 12.0]]
    assert len(asked) == 1
