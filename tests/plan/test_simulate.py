"""The simulator against cases worked out by hand, against a loop that ticks token by token, and against what no run can beat."""

from __future__ import annotations

from collections import deque
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.base.errors import ConfigError
from trimtab.config.run import Run
from trimtab.observe.simulation_view import simulation_dict, simulation_html, simulation_view
from trimtab.plan.arrange import arrange
from trimtab.plan.devices import find_device
from trimtab.plan.job import Job, Machine
from trimtab.plan.ledger import GIB
from trimtab.plan.scenario import draw_lengths, parse_quantiles, scenario_of, with_lengths
from trimtab.plan.shape import read_shape
from trimtab.plan.simulate import EngineSpeed, Scenario, Simulated, simulate
from trimtab.plan.source import WELL_KNOWN


def seconds_a_token(rows: int, seconds: float = 1.0) -> EngineSpeed:
    return EngineSpeed(rows, lambda batch, context: seconds)


def scenario(lengths: Any, engines: int = 1, rows: int = 4, **rest: Any) -> Scenario:
    return Scenario((seconds_a_token(rows),) * engines, tuple(map(tuple, lengths)), **rest)


# The first token comes from the pass over the prompt: a sequence of n tokens takes n - 1 decode steps.
FOUR = [[6, 6, 6, 10]] * 4


def test_a_synchronous_run_is_its_phases_one_after_the_other() -> None:
    found = simulate(scenario(FOUR, samples=2, reward_s=2, train_s=6, publish_s=1))
    assert found.total == 4 * (9 + 2 + 6) + 3 * 1 and found.step_s == 18
    assert [step.version for step in found.steps] == [0, 1, 2, 3]
    assert found.tokens == 4 * 28 and found.sequences == (16,)
    assert found.busy("trainer") == pytest.approx(24 / 71) and found.busy("rewards") == pytest.approx(8 / 71)


def test_one_step_behind_rollout_runs_beside_the_update() -> None:
    """Batches 0 and 1 are both of the first policy. Batch 2 waits for update 0, batch 3 for update 1."""
    found = simulate(scenario(FOUR, samples=2, reward_s=2, train_s=6, publish_s=1, staleness=1))
    begun = [(step.rollout_begin, step.rollout_end, step.train_begin, step.train_end) for step in found.steps]
    assert begun == [(0, 9, 11, 17), (5, 18, 20, 26), (19, 28, 30, 36), (29, 38, 40, 46)]
    assert [step.version for step in found.steps] == [0, 0, 1, 2]


def test_devices_that_do_everything_take_turns_and_only_rewards_are_beside() -> None:
    late = simulate(scenario(FOUR, samples=2, reward_s=2, train_s=6, publish_s=1, staleness=1, colocated=True))
    devices = sorted((s.begin, s.end) for s in late.spans if s.track in ("engine 0", "trainer"))
    assert all(first[1] <= second[0] for first, second in pairwise(devices)), "never two at once"
    now = simulate(scenario(FOUR, samples=2, reward_s=2, train_s=6, publish_s=1, colocated=True))
    assert now.total - late.total >= 2 * 2, "rewards of a batch are waited for beside the next rollout"


def test_an_idle_engine_takes_half_of_what_another_has_not_begun() -> None:
    """One group of eight, two engines of two rows: the first takes it whole; the second takes three of the six that wait."""
    found = simulate(scenario([[4] * 8], engines=2, rows=2, samples=8))
    assert found.stolen == 3 and found.sequences == (5, 3) and found.total == 9
    assert simulate(scenario([[4] * 8], engines=1, rows=2, samples=8)).total == 12


def test_slower_decode_steps_with_more_rows_and_longer_contexts_are_summed_exactly() -> None:
    speed = EngineSpeed(2, lambda batch, context: batch + context / 100, lambda tokens: tokens / 10)
    found = simulate(Scenario((speed,), ((3, 5),), samples=2, prompt_tokens=10))
    both = sum(2 + context / 100 for context in (10, 11))
    alone = sum(1 + context / 100 for context in (12, 13))
    assert found.total == pytest.approx(1 + both + alone)


def ticked(given: Scenario) -> float:
    """The same rules, second by second and token by token, for engines that take a second a token: written apart from the
    simulator, with whole batches as lists of tokens that are left."""
    queue = [deque(tuple(ls[i : i + given.samples]) for i in range(0, len(ls), given.samples)) for ls in given.lengths]
    rows: list[list[list[int]]] = [[] for _ in given.engines]  # [batch, tokens left]
    waiting: list[deque[tuple[int, int]]] = [deque() for _ in given.engines]
    version, changing = [0] * len(rows), [0] * len(rows)
    left = [len(ls) for ls in given.lengths]
    rewards: dict[int, int] = {}
    done, busy, now = 0, 0, 0
    while done < len(left):
        while True:  # all that can happen at this moment
            if busy == 0 and rewards.get(done) == 0:
                busy = int(given.train_s) + 1  # counted down at the end of each second
                rewards[done] = -1
            moved = False
            for e, held in enumerate(rows):
                if changing[e] or len(held) == given.engines[e].rows:
                    continue
                if not waiting[e]:
                    s = next((s for s, groups in enumerate(queue) if groups), None)
                    need = None if s is None else max(0, s - given.staleness)
                    if s is not None and need is not None and need <= done and (need == version[e] or not held):
                        moved = True
                        if need != version[e]:
                            version[e], changing[e] = need, int(given.publish_s)
                            if changing[e]:
                                continue
                        waiting[e].extend((s, n) for n in queue[s].popleft())
                    elif not held:
                        rich = max(range(len(rows)), key=lambda o: len(waiting[o]))
                        if waiting[rich] and max(0, waiting[rich][0][0] - given.staleness) == version[e]:
                            half = -(-len(waiting[rich]) // 2)
                            waiting[e].extend(reversed([waiting[rich].pop() for _ in range(half)]))
                            moved = True
                while waiting[e] and len(held) < given.engines[e].rows:
                    s, n = waiting[e].popleft()
                    held.append([s, n - 1])
                    moved = True
            for held in rows:
                for row in [row for row in held if row[1] == 0]:
                    held.remove(row)
                    left[row[0]] -= 1
                    moved = True
                    if left[row[0]] == 0:
                        rewards[row[0]] = int(given.reward_s)
            if not moved and not (busy == 0 and rewards.get(done) == 0):
                break
        now += 1
        for held in rows:
            for row in held:
                row[1] -= 1
        changing = [max(0, c - 1) for c in changing]
        rewards = {s: r - 1 if r > 0 else r for s, r in rewards.items()}
        if busy:
            busy -= 1
            if busy == 1:
                done, busy = done + 1, 0
    return float(now)


runs = st.builds(
    scenario,
    st.lists(st.lists(st.integers(1, 30), min_size=8, max_size=8), min_size=1, max_size=5),
    engines=st.integers(1, 4),
    rows=st.integers(1, 6),
    samples=st.sampled_from([1, 2, 4]),
    staleness=st.integers(0, 3),
    reward_s=st.integers(0, 4),
    train_s=st.integers(1, 40),
    publish_s=st.integers(1, 5),
)


@settings(max_examples=150, deadline=None)
@given(runs)
def test_within_a_tenth_of_a_loop_that_ticks(given: Scenario) -> None:
    assert simulate(given).total == pytest.approx(ticked(given), rel=0.1, abs=1)


def least_seconds(given: Scenario) -> float:
    """What no run can beat: the longest sequence and the update of a step; all updates; all tokens by all rows at once."""
    work = sum(length - 1 for ls in given.lengths for length in ls)
    rows = sum(engine.rows for engine in given.engines)
    longest = max(max(ls) - 1 for ls in given.lengths)
    updates = given.train_s * len(given.lengths)
    first = max(given.lengths[0]) - 1
    return max(work / rows + given.reward_s + given.train_s, longest + given.reward_s + given.train_s, first + updates)


def with_(given: Scenario, **values: Any) -> Scenario:
    return Scenario(**vars(given) | values)


@settings(max_examples=150, deadline=None)
@given(runs, st.booleans())
def test_no_faster_than_what_no_run_can_beat_and_counts_add_up(given: Scenario, colocated: bool) -> None:
    given = with_(given, colocated=colocated)
    found = simulate(given)
    assert found.total >= least_seconds(given) - 1e-9
    assert sum(found.sequences) == sum(map(len, given.lengths)) and found.tokens == sum(map(sum, given.lengths))
    assert len(found.steps) == len(given.lengths)
    for step in found.steps:
        assert step.rollout_begin <= step.rollout_end <= step.rewarded <= step.train_begin < step.train_end
        assert step.version == max(0, step.step - given.staleness), "exactly so many steps behind"
        if step.version:
            assert step.rollout_begin >= found.steps[step.version - 1].train_end, "no batch before its policy"
    trained = [(step.train_begin, step.train_end) for step in found.steps]
    assert all(first[1] <= second[0] for first, second in pairwise(trained))
    for track in found.tracks:
        if track == "rewards":  # of several batches at once
            continue
        mine = sorted((span.begin, span.end) for span in found.spans if span.track == track)
        assert all(first[1] <= second[0] + 1e-9 for first, second in pairwise(mine)), track
        assert found.busy(track) <= 1 + 1e-9


@settings(max_examples=150, deadline=None)
@given(runs)
def test_more_engines_and_more_staleness_are_never_slower(given: Scenario) -> None:
    """By more than one sequence and one new version: who takes which sequence is luck, and a long one may be taken last."""
    given = with_(given, samples=1)
    now, luck = simulate(given).total, max(map(max, given.lengths)) + given.publish_s
    assert simulate(with_(given, engines=(*given.engines, given.engines[0]))).total <= now + luck
    assert simulate(with_(given, staleness=given.staleness + 1)).total <= now + luck
    even = with_(given, lengths=tuple((10,) * len(ls) for ls in given.lengths))
    steady: list[Simulated] = [simulate(with_(even, staleness=k)) for k in range(4)]
    assert [run.total for run in steady] == sorted((run.total for run in steady), reverse=True), "without luck: never"
    more = [simulate(with_(even, engines=even.engines[:1] * n)).total for n in (1, 2, 4)]
    assert more == sorted(more, reverse=True)


def test_engines_of_different_speed_share_the_queue() -> None:
    lengths = (tuple([11] * 32),) * 2
    fast, slow = seconds_a_token(2), seconds_a_token(2, 3.0)
    found = simulate(Scenario((fast, slow), lengths, staleness=1, train_s=1))
    assert found.sequences[0] > 2 * found.sequences[1] > 0


JOB = Job(read_shape(WELL_KNOWN["qwen2.5-7b"]), 2, 64, 8, 512, 512, 2048)


def test_the_scenario_of_a_plan_takes_what_the_plan_predicts() -> None:
    """The formula of a plan and the simulation of it count the same work: for even lengths, and for those of a distribution."""
    for lengths in ((), parse_quantiles("p50=700,p90=1500,max=2048")):
        job = with_lengths(JOB, lengths)
        for staleness in (0, 1):
            split = arrange(Run(placement={"actor": 8, "rollout": 8}), Job(**vars(job) | {"staleness": staleness}),
                            Machine(find_device("h100"), 16, 1000 * GIB, 64)).chosen  # fmt: skip
            given = scenario_of(split, steps=6)
            found = simulate(given)
            assert found.step_s == pytest.approx(split.times.total, rel=0.12)
            assert len(given.engines) == 8 and found.tokens == sum(map(sum, given.lengths))


def test_lengths_are_drawn_by_seed_from_quantiles() -> None:
    job = with_lengths(JOB, parse_quantiles("p50=300,p90=900,max=4096"))
    one, again, other = (draw_lengths(job, 2, seed) for seed in (0, 0, 1))
    assert one == again != other
    flat = sorted(length for step in one for length in step)
    assert len(flat) == 2 * job.sequences and flat[0] >= 1 and flat[-1] <= job.completion
    assert flat[len(flat) // 2] == pytest.approx(300, rel=0.15)
    assert sum(flat) / len(flat) == pytest.approx(job.expected_completion, rel=0.08)
    for wrong in ("p50", "p50=900,p90=300", "p50=1,p50=2", "p120=4", "quick"):
        with pytest.raises(ConfigError, match="--lengths"):
            parse_quantiles(wrong)


def test_the_timeline_is_drawn_in_text_in_html_and_told_as_json() -> None:
    from io import StringIO

    from rich.console import Console

    given = scenario(FOUR, engines=20, samples=2, reward_s=2, train_s=6, publish_s=1, staleness=1)
    found = simulate(given)
    out = StringIO()
    Console(file=out, width=100).print(simulation_view(given, found))
    text = out.getvalue()
    assert "engine 11" in text and "engine 12" not in text and "and 8 more engines" in text
    trainer = next(line for line in text.splitlines() if "trainer" in line)
    assert trainer.count("U") == pytest.approx(found.busy("trainer") * 50, abs=4)
    page = simulation_html("a < b", given, found)
    assert "a &lt; b" in page and "<script" not in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert page.count("<rect") == sum(
        span.track in ("trainer", "rewards") or int(span.track[7:]) < 12 for span in found.spans
    )
    told = simulation_dict(given, found)
    assert told["step_seconds"] == pytest.approx(found.step_s) and len(told["spans"]) == len(found.spans)
