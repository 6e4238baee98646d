"""Profiles: what is asked for is checked, and traces are reduced to tables whose seconds and bytes add up."""

from __future__ import annotations

import pytest

from trimtab.base.errors import ConfigError
from trimtab.observe.profiling.kernels import BETWEEN, KernelSpan, reduce_kernels
from trimtab.observe.profiling.memory import BEFORE, NO_FRAME, reduce_memory
from trimtab.observe.profiling.request import KEYWORDS, ProfileRequest, parse_request, profile_request


def test_steps_and_ranks_are_read() -> None:
    assert parse_request("3:5", None) == ProfileRequest(3, 5, (0,))
    assert parse_request("4", "1, 0,1") == ProfileRequest(4, 4, (1, 0))
    assert parse_request(None, None) is None
    assert profile_request("3:5", 1) == ProfileRequest(3, 5, (1,), KEYWORDS)
    assert profile_request(4, "0,1") == ProfileRequest(4, 4, (0, 1), KEYWORDS)
    assert profile_request(None, None) is None


@pytest.mark.parametrize(
    ("steps", "ranks", "words"),
    [
        ("", None, "'' is no range of steps. Write first:last, such as 3:5"),
        ("a:b", None, "no range"),
        ("-1:2", None, "no range"),
        ("1:2:3", None, "no range"),
        ("0:2", None, "begins before the first step, which is 1"),
        ("5:3", None, "ends before it begins. Write 3:5"),
        ("1:21", None, "has 21 steps; a profile has 20 at most"),
        ("1:2", "x", "--profile-ranks: 'x' is no list of ranks. Write 0, or 0,1"),
        ("1:2", "0,", "no list of ranks"),
        (None, "0", "--profile-ranks: has no effect without --profile-steps"),
    ],
)
def test_what_cannot_be_meant_is_refused(steps: str | None, ranks: str | None, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_request(steps, ranks)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("steps", "ranks", "words"),
    [
        ([3, 5], None, 'profile_steps: got a list. Write "3:5", or one step'),
        (True, None, "profile_steps: got a bool"),
        ("3:5", (0, 1), 'profile_ranks: got a tuple. Write 0, or "0,1"'),
        (0, None, "profile_steps: '0' begins before the first step"),
        (None, 0, 'profile_ranks: has no effect without profile_steps. Add profile_steps="3:5"'),
    ],
)
def test_from_python_messages_name_the_keywords(steps: object, ranks: object, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        profile_request(steps, ranks)
    assert words in str(caught.value)
    with pytest.raises(ConfigError, match="profile_steps: step 5 is beyond"):
        ProfileRequest(3, 5, spelling=KEYWORDS).check_steps(4)


def test_what_the_run_does_not_have_is_refused_and_what_is_done_is_left_out() -> None:
    asked = ProfileRequest(3, 5, (0, 2))
    with pytest.raises(ConfigError, match=r"step 5 is beyond the last step of this run, 4\. Choose steps from 1 to 4"):
        asked.check_steps(4)
    with pytest.raises(ConfigError, match="no rank 2: this run has ranks 0 to 1"):
        asked.check_ranks(2)
    with pytest.raises(ConfigError, match="no rank 2: this run has one device, which is rank 0"):
        asked.check_ranks(1)
    assert asked.after(0) == asked.after(2) == asked
    assert asked.after(4) == ProfileRequest(5, 5, (0, 2))
    assert asked.after(5) is None


def test_an_operator_has_its_own_seconds_and_its_phase() -> None:
    spans = [
        KernelSpan("matmul", 0, 1_000_000),
        KernelSpan("mm", 100_000, 800_000),
        KernelSpan("copy", 200_000, 100_000),
        KernelSpan("mm", 2_000_000, 500_000),
        KernelSpan("mm", 3_000_000, 500_000, track=7),
    ]
    phases = [KernelSpan("update", 1_900_000, 700_000), KernelSpan("rollout", 0, 1_500_000)]
    found = reduce_kernels(spans, phases)
    rows = {(row["name"], row["phase"]): (row["seconds"], row["calls"]) for row in found["kernels"]}
    assert rows == {
        ("matmul", "rollout"): (pytest.approx(0.0002), 1),
        ("mm", "rollout"): (pytest.approx(0.0007), 1),
        ("copy", "rollout"): (pytest.approx(0.0001), 1),
        ("mm", "update"): (pytest.approx(0.0005), 1),
        ("mm", BETWEEN): (pytest.approx(0.0005), 1),
    }
    assert sum(row["share"] for row in found["kernels"]) == pytest.approx(1)
    first, second = found["gaps"]
    assert (first["after"], first["before"]) == ("matmul", "mm")
    assert first["seconds"] == pytest.approx(0.001) and first["at"] == pytest.approx(0.001)
    assert first["phase"] == "rollout" and second["seconds"] == pytest.approx(0.0005)


def test_nothing_that_ran_is_no_table() -> None:
    assert reduce_kernels([], []) == {"kernels": [], "kernels_left_out": 0, "gaps": []}


def entry(action: str, addr: int, size: int, at: int, *files: str) -> dict:
    frames = [{"filename": name, "line": 7, "name": "f"} for name in files]
    return {"action": action, "addr": addr, "size": size, "time_us": at, "frames": frames}


def test_memory_is_told_by_component_and_the_peak_by_block() -> None:
    engine, optimizer = (
        "/x/src/trimtab/rollout/native/arena.py",
        "/home/me/lib/site-packages/trimtab/update/optimizer.py",
    )
    entries = [
        entry("segment_alloc", 0, 10_000, 0),
        entry("alloc", 1, 100, 0, "torch/x.cpp", "/y/site-packages/torch/nn.py", engine),
        entry("alloc", 2, 300, 1_000_000, optimizer),
        entry("free_requested", 1, 100, 1_500_000),
        entry("free_completed", 99, 50, 2_000_000),  # was there before
        entry("alloc", 3, 40, 3_000_000),
        entry("free_completed", 1, 100, 4_000_000),
    ]
    found = reduce_memory(entries, allocated_at_end=790)
    assert found["peak_bytes"] == 900  # 500 before, 100 and 300
    assert [(block["bytes"], block["where"], block["component"]) for block in found["largest"]] == [
        (300, "trimtab/update/optimizer.py:7 f", "optimizer"),
        (100, "trimtab/rollout/native/arena.py:7 f", "engine"),
    ]
    timeline = found["timeline"]
    assert timeline["at"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert timeline["components"] == {
        BEFORE: [500, 500, 450, 450, 450],
        "optimizer": [0, 300, 300, 300, 300],
        "engine": [100, 100, 100, 100, 0],
        NO_FRAME: [0, 0, 0, 40, 40],
    }


def test_a_long_record_is_drawn_with_few_points_and_its_peak() -> None:
    entries = [entry("alloc", n, 1, n) for n in range(5000)]
    entries[3333]["size"] = 10_000
    entries.insert(3334, entry("free_completed", 3333, 10_000, 3333))
    found = reduce_memory(entries, 4999)
    assert found["peak_bytes"] == 10_000 + 3333
    assert len(found["timeline"]["at"]) < 500
    assert max(map(sum, zip(*found["timeline"]["components"].values()))) == found["peak_bytes"]
    assert len(found["largest"]) == 50 and found["largest"][0]["bytes"] == 10_000
    assert reduce_memory([], 10)["peak_bytes"] == 10
