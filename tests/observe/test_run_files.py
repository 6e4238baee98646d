"""A run of any stage records what it does; nothing of that is in its way, and no thread outlives it."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from running import letters, train

from trimtab.base.spans import MAX_SPANS, SpanLog, log
from trimtab.observe.device_watch import DeviceWatch, open_device_watch
from trimtab.observe.journal import Journal
from trimtab.observe.observer import LocalObserver
from trimtab.observe.process_memory import HostPeaks, ProcessTree
from trimtab.observe.pulse import Pulse
from trimtab.observe.timeline import Timeline
from trimtab.plan.governor import Move
from trimtab.record.reader import RunReader
from trimtab.rollout.native.round_clock import RoundClock

USUAL: dict[str, Any] = {
    "data": [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(8)],
    "learn": {"steps": 3, "prompts_per_step": 4, "samples_per_prompt": 4, "max_new_tokens": 8, "lr": 1e-2},
    "run": {"device": "cpu", "threads": 1},
    "observe": {"checkpoint_every": 0},
}


def own_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("trimtab-") and name != "trimtab-renderings"]  # no run's own


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


# --- a whole run


@pytest.fixture(scope="module")
def run(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunReader:
    usual = {**USUAL, "eval_data": USUAL["data"][:3], "reward": letters, "eval": {"threshold": 2.0}}
    found = train(model_folder, tmp_path_factory.mktemp("run") / "a", usual, {"observe": {"samples_rows": 6}})
    reader = RunReader(found.folder)
    reader.update()
    return reader


def test_every_row_has_a_clock_its_start_and_the_tokens_so_far(run: RunReader) -> None:
    at, tokens = run.metrics.column("time/at"), run.metrics.column("run/tokens_total")
    assert len(at) == 4 and all(at[1:] >= at[:-1]) and all(run.metrics.column("run/start") == 1.0)
    assert (
        tokens[0] == 0
        and list(tokens) == sorted(tokens)
        and tokens[-1] == run.metrics.column("rollout/tokens")[1:].sum()
    )


def test_a_step_says_what_it_was_made_of(run: RunReader) -> None:
    names = set(run.metrics.names)
    assert {
        "time/observe", "rollout/prefill_tokens", "rollout/decode_steps", "rollout/slots", "rollout/tail_s",
        "update/forward_backward_s", "update/optimizer_s", "memory/rollout_peak_gib", "memory/update_peak_gib",
        "memory/optimizer_peak_gib",
    } <= names  # fmt: skip
    for name in ("update/offload_wait_s", "memory/device_used_gib", "memory/reserved_peak_gib", "device/util"):
        assert name not in names, "not measured here, so absent"
    assert not {"memory/update_predicted_gib", "memory/predicted_over_measured"} & names, (
        "no plan is for the process tree"
    )
    parts = run.metrics.column("update/forward_backward_s") + run.metrics.column("update/optimizer_s")
    assert all(parts[1:] <= run.metrics.column("time/update")[1:])
    assert all(run.metrics.column("rollout/tail_s")[1:] <= run.metrics.column("rollout/decode_s")[1:])


def test_run_json_tells_the_facts_and_the_end(run: RunReader) -> None:
    found = run.run()
    assert (found["version"], found["stage"], found["state"], found["error"]) == (1, "rl", "finished", None)
    assert {"model.path", "learn.lr", "observe.samples_rows"} <= set(found["set"])
    assert found["device"]["name"] == "CPU" and found["parameters"] > 0 and found["ended_at"] > found["starts"][0]["at"]
    assert (found["steps"], found["starts"][0]["step"]) == (3, 1)
    assert {"trimtab", "python", "torch", "transformers", "packages", "host", "git", "seed", "resume"} <= set(found)


def test_now_json_is_that_of_a_run_that_has_ended(run: RunReader) -> None:
    now = run.now()
    assert (now["phase"], now["step"], now["steps"], now["start"], now["done"]) == (None, 3, 3, 1, None)


def test_events_tell_the_story(run: RunReader) -> None:
    kinds = [(event["kind"], event["step"]) for event in run.events()]
    assert kinds[0] == ("start", 0) and kinds[-1] == ("end", 3)
    assert ("evaluation", 0) in kinds and ("evaluation", 3) in kinds and ("checkpoint", 3) in kinds
    (last,) = [event for event in run.events() if "waited_s" in event["data"]]
    waits = [span for span in run.trace() if span["name"] == "checkpoint" and span["args"].get("step") == 3]
    assert last["text"].startswith("waited ") and last["step"] == 3
    assert 0 < last["data"]["waited_s"] <= sum(span["dur"] for span in waits) / 1e6 + 1e-3


def test_samples_results_and_distributions(run: RunReader) -> None:
    index = run.sample_index()
    assert [(line["kind"], line["step"]) for line in index] == [("eval", 0), ("train", 1), ("eval", 3), ("train", 3)]
    assert all(line["bytes"] == (run.folder / line["file"]).stat().st_size for line in index)
    rows = run.samples(3)
    assert len(rows) == 6 and {row["chosen"] for row in rows} == {"best", "worst", "random"}
    assert all(row["advantage"] is not None and row["answer"] and row["prompt_tokens"] == 4 for row in rows)
    assert [row["prompt_id"] for row in run.eval_results(0)] == [0, 1, 2]
    assert all(row["right"] == (row["rights"] == 1) for row in run.eval_results(3))
    found = run.distributions()
    assert [row["step"] for row in found] == [1, 2, 3]
    for row in found:
        assert sum(row["lengths"]["counts"]) == sum(row["rewards"]["counts"]) == sum(row["advantages"]["counts"]) == 16
        assert sum(row["groups"]["right"]) == 4 and len(row["groups"]["right"]) == 5


def test_the_trace_has_every_part_on_its_track(run: RunReader) -> None:
    trace = run.trace()
    names = {event["tid"]: event["args"]["name"] for event in trace if event["name"] == "thread_name"}
    spans = [(names[e["tid"]], e["name"]) for e in trace if e["ph"] == "X"]
    assert {
        ("phases", "step 2"), ("engine", "prefill"), ("engine", "decode"), ("update", "micro-batch"),
        ("update", "optimizer step"), ("rewards", "letters"), ("checkpoints", "checkpoint"),
    } <= set(spans)  # fmt: skip
    assert all(isinstance(event["args"]["step"], int) for event in trace if event["ph"] == "X")
    assert max(event["args"]["step"] for event in trace if event["ph"] == "X") == 3
    counters = {event["name"] for event in trace if event["ph"] == "C"}
    assert {"running sequences", "KV pages"} <= counters
    steps = {e["args"]["step"]: (e["ts"], e["ts"] + e["dur"]) for e in trace if e["name"].startswith("step ")}
    slack = 50  # microseconds, of rounding and of two clocks
    for event in (e for e in trace if e["ph"] == "X" and names[e["tid"]] in ("engine", "update")):
        first, last = steps[event["args"]["step"]]
        assert first - slack <= event["ts"] and event["ts"] + event["dur"] <= last + slack


def test_nothing_is_left_running(run: RunReader) -> None:
    assert own_threads() == [] and not log.on


# --- other stages, resumes, ends


@pytest.mark.parametrize("stage", ["sft", "reward_model"])
def test_other_stages_record_what_they_have(model_folder: Path, tmp_path: Path, stage: str) -> None:
    row = (
        {"prompt": "1+1=", "completion": "2"} if stage == "sft" else {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    )
    size = {"sequences_per_step": 2} if stage == "sft" else {"pairs_per_step": 2}
    usual = {"data": [row] * 4, "learn": {"steps": 2, **size}, "run": USUAL["run"], "observe": USUAL["observe"]}
    found = train(model_folder, tmp_path / "a", usual, stage=stage)
    reader = RunReader(found.folder)
    assert (reader.run()["stage"], reader.run()["state"]) == (stage, "finished")
    assert next(event["kind"] for event in reader.events()) == "start"
    assert reader.distributions() == reader.sample_index() == []
    last = found.metrics[-1]
    assert last["update/forward_backward_s"] > 0 and last["run/tokens_total"] > 0 and "rollout/tail_s" not in last
    assert own_threads() == []


def test_a_run_that_fails_says_so_and_goes_on_as_another_start(model_folder: Path, tmp_path: Path) -> None:
    def stop(step: int, metrics: Any) -> None:
        if step == 2:
            raise RuntimeError("enough")

    usual = {**USUAL, "reward": letters, "observe": {"checkpoint_every": 1, "samples_every": 1}}
    with pytest.raises(RuntimeError, match="enough"):
        train(model_folder, tmp_path / "a", usual, {"callbacks": [stop]})
    reader = RunReader(tmp_path / "a")
    assert (reader.run()["state"], reader.run()["error"]) == ("failed", {"type": "RuntimeError", "text": "enough"})
    assert (reader.events()[-1]["kind"], reader.events()[-1]["level"]) == ("error", "error")
    assert own_threads() == [] and not log.on
    (tmp_path / "a/distributions.jsonl").open("a").write('{"step": 9}\n{"st')
    found = train(model_folder, tmp_path / "a", usual, {"resume": True})
    assert [row["run/start"] for row in found.metrics] == [1.0, 1.0, 2.0]
    assert [row["step"] for row in reader.distributions()] == [1, 2, 3]
    assert [line["step"] for line in reader.sample_index()] == [1, 2, 3]
    run = reader.run()
    assert (run["state"], run["error"], [start["step"] for start in run["starts"]]) == ("finished", None, [1, 3])
    assert [event["kind"] for event in reader.events() if event["kind"] in ("start", "resume", "error", "end")] == [
        "start", "error", "resume", "end",
    ]  # fmt: skip


def test_a_full_disk_for_samples_ends_the_run_at_the_next_step(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("trimtab.record.samples.write_file", full)
    usual = {**USUAL, "reward": letters}
    with pytest.raises(OSError, match="No space left"):
        train(model_folder, tmp_path / "a", usual)
    assert RunReader(tmp_path / "a").run()["error"]["type"] == "OSError"
    assert own_threads() == []


# --- the parts


def test_a_failed_write_of_now_json_is_nobodys_business(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path / "gone", 5, 1)
    pulse.start()
    pulse.close()
    assert own_threads() == [] and not (tmp_path / "gone").exists()


def test_now_json_has_the_phase_and_how_far_it_is(tmp_path: Path) -> None:
    spans, clock = SpanLog(), Clock()
    pulse = Pulse(tmp_path, 5, 2, clock=clock, spans=spans)
    assert pulse.state()["phase"] == "starting"
    clock.now += 1
    pulse.step = 3
    pulse.phase("rollout")
    spans.progress = (4, 16, "samples")
    clock.now += 2
    pulse.write()
    found = json.loads((tmp_path / "now.json").read_text())
    assert (found["at"], found["since"], found["step"], found["steps"], found["start"]) == (103.0, 101.0, 3, 5, 2)
    assert (found["phase"], found["done"], found["total"], found["unit"]) == ("rollout", 4, 16, "samples")
    pulse.phase(None, "writing the final model")
    assert (pulse.state()["phase"], pulse.state()["done"]) == ("idle", None)
    assert pulse.state()["what"] == "writing the final model"


def test_what_a_look_raises_is_not_told(tmp_path: Path) -> None:
    looked = threading.Event()

    def look() -> None:
        looked.set()
        raise RuntimeError

    pulse = Pulse(tmp_path, 5, 1, [look])
    pulse.start()
    assert looked.wait(30)
    pulse.close()
    assert own_threads() == []


def test_a_journal_without_a_folder_writes_nothing(tmp_path: Path) -> None:
    journal = Journal()
    journal.event("warn", "warning", "early")
    journal.phase("rollout")
    journal.exit(None, None, None)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("error", "state"), [(KeyboardInterrupt(), "stopped"), (ValueError("x"), "failed"), (None, "stopped")]
)
def test_how_it_ended(tmp_path: Path, error: BaseException | None, state: str) -> None:
    journal = Journal()
    journal.open(tmp_path, None, 5, {"set": []})
    journal.exit(None if error is None else type(error), error, None)
    assert RunReader(tmp_path).run()["state"] == state


def test_detail_is_kept_of_first_of_every_fiftieth_and_of_slow_steps(tmp_path: Path) -> None:
    clock, spans = Clock(), SpanLog()
    timeline = Timeline(tmp_path, clock=clock, wall_clock=clock, spans=spans)
    for step in range(1, 102):
        begin = clock.now
        clock.now += 3.0 if step == 77 else 1.0
        spans.add("engine", "decode", begin, clock.now, sequences=step)
        spans.count("running sequences", begin, step)
        timeline.end_step(step)
    timeline.close()
    trace = RunReader(tmp_path).trace()
    detailed = [event["args"]["step"] for event in trace if event["name"] == "decode"]
    assert detailed == [*range(1, 21), 50, 77, 100]
    assert sum(event["ph"] == "C" for event in trace) == len(detailed)
    assert sum(event["name"].startswith("step ") for event in trace) == 101
    assert not spans.on


def test_spans_of_one_step_are_bounded_and_cost_nothing_where_nobody_listens() -> None:
    spans = SpanLog()
    spans.add("engine", "decode", 0.0, 1.0)
    assert spans.take().spans == []
    spans.on = True
    for _ in range(MAX_SPANS + 3):
        spans.add("engine", "decode", 0.0, 1.0)
    taken = spans.take()
    assert (len(taken.spans), taken.left_out) == (MAX_SPANS, 3)


def test_peaks_of_the_process_tree_by_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = ProcessTree()
    assert tree.rss_bytes() > 2**20
    tree.close()
    held = iter([3, 5, 4, 7])
    monkeypatch.setattr(tree, "rss_bytes", lambda: next(held) * 2**30)
    peaks = HostPeaks(tree, SpanLog())
    peaks.look()  # in no phase: nobody's, and not read
    peaks.begin("update")
    peaks.look()
    peaks.begin("optimizer")
    peaks.end()
    peaks.end()
    assert peaks.take() == {"update": 5.0, "optimizer": 5.0}
    peaks.begin("rollout")
    peaks.end()
    assert peaks.take() == {"rollout": 7.0}


class FakeNvml:
    """A device that does not tell its power."""

    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0
    util = 50

    class NVMLError(Exception): ...

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=self.util + handle)

    def nvmlDeviceGetPowerUsage(self, handle: int) -> Any:
        raise self.NVMLError("not supported")

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:
        return 60 + handle

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:
        return 900

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:
        return 1800

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=2**30 * (1 + handle))


def test_devices_are_sampled_and_what_they_do_not_tell_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.observe.device_watch.SAMPLE_EVERY_S", 0.0)
    watch = DeviceWatch(FakeNvml(), [0, 10], SpanLog())
    assert watch.end_step() == {}
    watch.look()
    expected = {
        "device/util": 0.55, "device/temperature_c": 70.0, "device/clock_share": 0.5, "memory/device_used_gib": 11.0,
    }  # fmt: skip
    assert watch.end_step() == pytest.approx(expected)
    assert watch.end_step() == pytest.approx(expected), "a short step has the sample before"
    assert open_device_watch(["no such device"]) is None


def test_budget_moves_and_lost_ranks_are_events(tmp_path: Path) -> None:
    journal = Journal()
    journal.open(tmp_path, 4, 9, {"set": []})
    observer: Any = SimpleNamespace(_journal=journal)
    LocalObserver.moved(observer, Move(4096, False), Move(8192, "some"))
    journal.restarting()
    journal.exit(RuntimeError, RuntimeError("again"), None)
    reader = RunReader(tmp_path)
    budget = next(event for event in reader.events() if event["kind"] == "budget")
    assert budget["text"] == "token budget 4,096 -> 8,192, checkpoint_activations False -> some"
    assert (budget["step"], budget["data"]["token_budget"]) == (5, 8192)
    assert (reader.run()["state"], reader.run()["ended_at"], reader.run()["error"]) == ("starting", None, None)


@pytest.mark.parametrize("prefills", [0, 1])
def test_the_tail_is_decoding_with_few_sequences_and_none_to_come(prefills: int) -> None:
    work: Any = SimpleNamespace(pool=SimpleNamespace(held=7), waiting=[], filling=[], ready=[], preempted=[])
    log.take()
    log.on = True
    clock = RoundClock(usable=16)
    for at, sequences in enumerate((16, 16, 3, 3, 2)):
        clock.began(float(at))
        if at < prefills:
            clock.filled(at + 0.25, 64)
        work.waiting = [1] if at == 2 else []
        clock.decoded(at + 1.0, sequences, 4, work)
        clock.looked_at(clock.launched)
    clock.end()
    taken = log.take()
    log.forget()
    assert clock.tail_s == 2.0 and clock.prefill_s == 0.25 * prefills
    decodes = [(span.begin, span.end, span.args) for span in taken.spans if span.name == "decode"]
    assert [(end, facts["sequences"], facts["steps"]) for _, end, facts in decodes] == [
        (2.0, 16, 8),
        (4.0, 3, 8),
        (5.0, 2, 4),
    ]
    running = [(value.at, value.value) for value in taken.counters if value.name == "running sequences"]
    assert running[-1] == (5.0, 0) and [value for _, value in running] == [16, 3, 2, 0]
