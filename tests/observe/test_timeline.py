"""Every second belongs to one phase or to idle, and the trace opens whatever happened to the process."""

import json

import pytest

from trimtab.observe.timeline import PHASES, Timeline


class FakeClock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return FakeClock()


def timeline_at(run_dir, clock, **kwargs):
    return Timeline(run_dir, clock=clock, wall_clock=lambda: 1_000_000.0 + clock.now, **kwargs)


def run_step(timeline, clock, step, **phases):
    for name, seconds in phases.items():
        with timeline.phase(name):
            clock.now += seconds
    return timeline.end_step(step)


def load_trace(run_dir):
    return json.loads((run_dir / "trace.json").read_text() + "]")


def spans(run_dir):
    return [(e["name"], e["ts"], e["dur"]) for e in load_trace(run_dir) if e["ph"] == "X"]


def test_idle_is_the_total_less_all_phases(tmp_path, clock):
    timeline = timeline_at(tmp_path, clock)
    clock.now += 0.5
    with timeline.phase("rollout"):
        clock.now += 3.0
    clock.now += 0.25
    with timeline.phase("update"):
        clock.now += 1.0
    with timeline.phase("rollout"):
        clock.now += 2.0
    assert timeline.end_step(1) == {
        "time/rollout": 5.0,
        "time/reward": 0.0,
        "time/score": 0.0,
        "time/update": 1.0,
        "time/publish": 0.0,
        "time/checkpoint": 0.0,
        "time/eval": 0.0,
        "time/idle": 0.75,
        "time/total": 6.75,
    }


def test_a_step_starts_where_the_last_one_ended(tmp_path, clock):
    timeline = timeline_at(tmp_path, clock)
    run_step(timeline, clock, 1, rollout=1.0)
    clock.now += 0.5
    metrics = run_step(timeline, clock, 2, reward=2.0)
    assert (metrics["time/total"], metrics["time/idle"], metrics["time/rollout"]) == (2.5, 0.5, 0.0)


def test_rounding_never_makes_idle_negative(tmp_path, clock):
    timeline = timeline_at(tmp_path, clock)
    metrics = run_step(timeline, clock, 1, rollout=0.1, reward=0.2, score=0.3, update=0.7, publish=1e-9)
    assert 0.0 <= metrics["time/idle"] < 1e-9


def test_phases_do_not_nest_or_outlive_their_step(tmp_path, clock):
    timeline = timeline_at(tmp_path, clock)
    with timeline.phase("rollout"):
        with pytest.raises(AssertionError, match="'reward' opened inside 'rollout'"), timeline.phase("reward"):
            pass
        with pytest.raises(AssertionError, match="step 3 ended inside phase 'rollout'"):
            timeline.end_step(3)
    with pytest.raises(AssertionError, match="unknown phase"), timeline.phase("lunch"):
        pass


def test_a_phase_that_fails_is_still_counted_and_closed(tmp_path, clock):
    timeline = timeline_at(tmp_path, clock)

    def fail():
        with timeline.phase("reward"):
            clock.now += 2.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert run_step(timeline, clock, 1, update=1.0)["time/reward"] == 2.0


def test_phases_are_announced(tmp_path, clock):
    seen = []
    run_step(timeline_at(tmp_path, clock, on_phase=seen.append), clock, 1, **dict.fromkeys(PHASES, 1.0))
    assert seen == list(PHASES)


def test_trace_holds_steps_phases_and_events_in_wall_clock_microseconds(tmp_path, clock):
    timeline = timeline_at(tmp_path, clock)
    start = clock()
    with timeline.phase("rollout"):
        clock.now += 1.5
    timeline.event("prefill", start, start + 0.5, tokens=128)
    timeline.end_step(7)
    first = 1_000_100_000_000
    assert spans(tmp_path) == [
        ("step 7", first, 1_500_000),
        ("rollout", first, 1_500_000),
        ("prefill", first, 500_000),
    ]
    prefill = load_trace(tmp_path)[-1]
    assert prefill["args"] == {"step": 7, "tokens": 128}
    assert prefill["tid"] != load_trace(tmp_path)[-2]["tid"]


def test_trace_is_readable_from_the_start_and_after_every_step_without_closing(tmp_path, clock):
    timeline = timeline_at(tmp_path, clock)
    assert spans(tmp_path) == []
    for step in (1, 2, 3):
        run_step(timeline, clock, step, rollout=1.0)
        assert len(spans(tmp_path)) == 2 * step
    assert (tmp_path / "trace.json").read_text().startswith('[{"')  # how Perfetto knows the format


@pytest.mark.parametrize("cut", [1, 5, 40])
def test_resume_appends_after_dropping_a_torn_line(tmp_path, clock, cut):
    run_step(timeline_at(tmp_path, clock), clock, 1, rollout=1.0)
    path = tmp_path / "trace.json"
    path.write_bytes(path.read_bytes()[:-cut])
    timeline = timeline_at(tmp_path, clock)
    run_step(timeline, clock, 2, update=1.0)
    timeline.close()
    assert [name for name, _, _ in spans(tmp_path)] == ["step 1", "step 2", "update"]


@pytest.mark.parametrize("left", [0, 1, 90])
def test_resume_repairs_a_file_killed_inside_its_header(tmp_path, clock, left):
    timeline_at(tmp_path, clock).close()
    path = tmp_path / "trace.json"
    whole = path.read_bytes()
    path.write_bytes(whole[:left])
    timeline_at(tmp_path, clock).close()
    assert path.read_bytes() == whole


def test_close_writes_what_is_pending_and_can_be_repeated(tmp_path, clock):
    timeline = timeline_at(tmp_path, clock)
    timeline.event("load", 100.0, 101.0)
    timeline.close()
    timeline.close()
    assert [name for name, _, _ in spans(tmp_path)] == ["load"]
