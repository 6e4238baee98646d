"""What the routes give: metrics, samples, searches, plans, lists."""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.observe.planted import DISTINCT, plant
from tests.web.serving import Client, serving, wait_for, write_run
from trimtab.observe.web.server import search as search_module
from trimtab.observe.web.server.columns import metrics_body
from trimtab.observe.web.server.search import Query, parse_cursor, search
from trimtab.record.columns import MetricTable


def unpack(body: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    (length,) = struct.unpack("<I", body[:4])
    header = json.loads(body[4 : 4 + length])
    names, rows = ["step", *(name for name in header["names"] if name not in header["wide"])], header["rows"]
    end = 4 + length + 4 * rows * len(names)
    columns = dict(zip(names, np.frombuffer(body[4 + length : end], dtype="<f4").reshape(len(names), rows)))
    assert end % 8 == 0 and len(body) == end + 8 * rows * len(header["wide"])
    wide = np.frombuffer(body[end:], dtype="<f8").reshape(len(header["wide"]), rows)
    return header, columns | dict(zip(header["wide"], wide))


def table(rows: int, spike: int | None = None) -> MetricTable:
    lines = [{"step": step, "a": 1.0, "b": float(step)} for step in range(1, rows + 1)]
    if spike:
        lines[spike - 1] |= {"a": 99.0, "b": float("nan")}
    return MetricTable(lines)


def test_columns_are_what_was_written() -> None:
    header, columns = unpack(metrics_body(table(5, spike=3)))
    assert (header["names"], header["rows"], header["steps"]) == (["a", "b"], 5, 5)
    assert columns["step"].tolist() == [1, 2, 3, 4, 5]
    assert columns["a"].tolist() == [1, 1, 99, 1, 1]
    assert np.isnan(columns["b"][2])
    header, columns = unpack(metrics_body(table(9), ["b", "none", "b"], first=3, last=5))
    assert (header["names"], columns["b"].tolist()) == (["b"], [3, 4, 5])
    assert unpack(metrics_body(MetricTable()))[0]["rows"] == 0


def test_clocks_are_right_to_the_millisecond() -> None:
    lines = [{"step": step, "a": 0.5, "time/at": 1.8e9 + 0.001 * step, "z": 1.0} for step in range(1, 4)]
    header, columns = unpack(metrics_body(MetricTable(lines)))
    assert (header["names"], header["wide"]) == (["a", "time/at", "z"], ["time/at"])
    assert columns["z"].tolist() == [1, 1, 1]
    assert (columns["time/at"] - 1.8e9).tolist() == pytest.approx([0.001, 0.002, 0.003], abs=1e-6)


@pytest.mark.parametrize(("rows", "points"), [(10_000, 800), (1001, 1000), (17, 8), (9, 1)])
def test_fewer_points_keep_every_extreme(rows: int, points: int) -> None:
    spike = rows // 3
    header, columns = unpack(metrics_body(table(rows, spike), points=points))
    assert header["rows"] <= max(points, 8)
    assert header["steps"] == rows
    assert columns["a"].max() == 99 and columns["a"].min() == 1
    assert np.nanmin(columns["b"]) == 1 and np.nanmax(columns["b"]) == rows
    assert (np.diff(columns["step"]) >= 0).all()


def test_findings_of_an_earlier_step(tmp_path: Path) -> None:
    plant(tmp_path / "runs" / "run", "rollout_tail")
    with serving(tmp_path / "runs") as server:
        assert server.ask("/api/runs/run/findings?step=2").json == {"findings": []}
        late = server.ask("/api/runs/run/findings?step=150").json["findings"]
        assert late == server.ask("/api/runs/run").json["findings"] and late[0]["rule"] == "rollout_tail"
        for wrong in ("", "?step=x", "?step=-1", "?step=1e99", "?step=nan"):
            assert server.ask(f"/api/runs/run/findings{wrong}").status in (400, 422), wrong
        assert server.ask("/api/runs/none/findings?step=1").status == 404


@pytest.mark.parametrize("name", DISTINCT)
def test_every_planted_run_can_be_asked_everything(tmp_path: Path, name: str) -> None:
    plant(tmp_path / "runs" / "run", name)
    with serving(tmp_path / "runs") as server:
        (head,) = server.ask("/api/runs").json["runs"]
        assert head["id"] == "run"
        run = server.ask("/api/runs/run")
        assert run.status == 200, run.body
        assert run.json["id"] == "run" and run.json["live"]
        header, columns = unpack(server.ask("/api/runs/run/metrics").body)
        assert header["rows"] == len(columns["step"])
        assert server.ask("/api/runs/run/trace?from=0&until=3").status == 200
        assert server.ask("/api/compare?runs=run").status == 200
        assert b"trimtab_run_info" in server.ask("/metrics").body
        sampled = (tmp_path / "runs" / "run" / "samples" / "step-10.jsonl").exists()
        answer = server.ask("/api/runs/run/samples?step=10")
        assert answer.status == (200 if sampled else 404)
        reader = server.follow("/api/runs/run/events")
        assert reader.next("now")["data"]["kind"] == run.json["state"]["kind"]
        reader.close()


def sampled(run: Path, steps: range, kind: str = "train", rows: int = 4) -> None:
    folder = run / ("samples" if kind == "train" else "eval/samples")
    folder.mkdir(parents=True, exist_ok=True)
    for step in steps:
        lines = [
            {
                "step": step,
                "prompt_id": f"p{row}",
                "sample": row,
                "prompt": 'say "hi"',
                "completion": f"Näme\n{step}.{row}<b>",
            }
            for row in range(rows)
        ]
        (folder / f"step-{step}.jsonl").write_text(
            "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        )


def test_samples_of_a_step(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a")
    sampled(run, range(1, 3))
    sampled(run, range(1, 2), "eval", rows=2)
    with (run / "samples" / "step-2.jsonl").open("ab") as file:
        file.write(b"not JSON\n")
    with serving(tmp_path / "runs") as server:
        found = server.ask("/api/runs/a/samples?step=2&kind=train").json
        assert ([row["sample"] for row in found["rows"]], found["damaged"]) == ([0, 1, 2, 3], 1)
        assert len(server.ask("/api/runs/a/samples?step=1&kind=eval").json["rows"]) == 2
        assert server.ask("/api/runs/a/samples?step=9").status == 404
        assert server.ask("/api/runs/a/samples?step=1&kind=other").status == 422


def pages(run: Path, query: Query, **more: Any) -> tuple[list[tuple[int, int]], int]:
    found, cursor, count = [], None, 0
    while True:
        page = search(run, run, query, cursor, **more)
        found += [(row["step"], row["sample"]) for row in page["rows"]]
        count += 1
        if page["cursor"] is None:
            return found, count
        cursor = parse_cursor(page["cursor"])


def test_a_search_gives_every_hit_once_newest_first(tmp_path: Path) -> None:
    sampled(tmp_path, range(1, 61))
    every = [(step, row) for step in range(60, 0, -1) for row in range(4)]
    found, count = pages(tmp_path, Query("NÄME"))
    assert found == [] and count == 1  # ASCII letters match in either case, others as they are
    found, count = pages(tmp_path, Query("nämE"))
    assert (found, count) == (every, 5)
    assert pages(tmp_path, Query(r"^n.me\s+\d+\.[12]<b>", is_regex=True))[0] == [
        hit for hit in every if hit[1] in (1, 2)
    ]
    assert pages(tmp_path, Query('say "hi"'))[0] == every
    assert pages(tmp_path, Query("\n7.3<"))[0] == [(7, 3)]
    assert pages(tmp_path, Query("prompt_id"))[0] == []  # the name of a field is not its text


def test_a_search_goes_on_where_its_time_was_up(tmp_path: Path) -> None:
    sampled(tmp_path, range(1, 11))
    ticks = iter(range(10**6))
    found, count = pages(tmp_path, Query("näme"), clock=lambda: next(ticks) * 0.4)
    assert found == [(step, row) for step in range(10, 0, -1) for row in range(4)]
    assert count > 10


def test_kinds_and_places_of_a_search(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a")
    sampled(run, range(1, 3))
    sampled(run, range(2, 3), "eval", rows=1)
    with serving(tmp_path / "runs") as server:
        hits = server.ask("/api/runs/a/search?q=me").json["rows"]
        assert [(row["step"], row["kind"]) for row in hits] == [(2, "train")] * 4 + [(2, "eval")] + [(1, "train")] * 4
        assert hits[0]["found"] == {"field": "completion", "before": "Nä", "match": "me", "after": "\n2.0<b>"}
        assert len(server.ask("/api/runs/a/search?q=me&kind=eval").json["rows"]) == 1
        assert server.ask("/api/runs/a/search?q=(&regex=1").status == 422
        assert server.ask("/api/runs/a/search?q=").status == 422
        assert server.ask("/api/runs/a/search?q=a&cursor=../..").status == 422


def test_a_pattern_cannot_keep_the_server_busy(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a")
    (run / "samples").mkdir()
    line = json.dumps({"prompt": "", "completion": "a" * 4000 + "!"})
    (run / "samples" / "step-1.jsonl").write_text(f"{line}\n" * 5)
    with serving(tmp_path / "runs") as server:
        started = time.monotonic()
        answer = server.ask("/api/runs/a/search?q=(a%7Ca)*%24&regex=1")
        assert answer.status == 200
        assert time.monotonic() - started < search_module.MAX_SECONDS + 3


QUICK_PLANS = slice(3, 5)
PLACED = {"placement", "roles", "runners_up", "tokens_per_device_second"}
"""What the explorer does not show: it plans all roles together."""


@pytest.mark.parametrize("which", [QUICK_PLANS, pytest.param(slice(0, 3), marks=pytest.mark.slow)])
def test_plans_are_those_of_trimtab_plan(which: slice, tmp_path: Path) -> None:
    from trimtab.run.plan_command import PlanOptions, look

    run = write_run(tmp_path / "runs" / "a")
    cases = [
        ({"device": "h200"}, [], PlanOptions(device="h200")),
        ({"device": "rtx4090", "devices": 2}, ["learn.max_new_tokens=3000"], PlanOptions(device="rtx4090", devices=2)),
        ({"device": "h100", "device_memory": "40GiB"}, ["run.shard=none"], PlanOptions(device="h100", device_memory="40GiB")),
        ({"device": "a100", "profile": "safe"}, ["model.lora={r: 8}"], PlanOptions(device="a100", profile="safe")),
        ({"device": "t4", "device_memory": "2GiB"}, ["learn.steps=9"], PlanOptions(device="t4", device_memory="2GiB")),
    ]  # fmt: skip
    with serving(tmp_path / "runs") as server:
        for body, overrides, options in cases[which]:
            answer = server.ask("/api/plan", "POST", body | {"run": "a", "overrides": overrides})
            assert answer.status == 200, answer.body
            expected = json.loads(json.dumps(look(run / "config.yaml", overrides, options).as_dict()))
            found = answer.json
            assert expected.keys() - found.keys() <= PLACED
            found["choices"] = [choice for choice in found["choices"] if choice["key"] != "run.placement"]
            for key in expected.keys() - PLACED - {"notes"}:
                assert found[key] == expected[key], key
            if not found["fits"]:
                assert found["changes"] and found["missing_bytes"] > 0 and found["binds"]
        assert found["fits"] is (which != QUICK_PLANS)  # the last one does not


def test_the_run_as_it_is_takes_what_it_took(tmp_path: Path) -> None:
    plant(tmp_path / "runs" / "run", "healthy")
    with serving(tmp_path / "runs") as server:
        before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")}
        found = server.ask("/api/plan", "POST", {"run": "run"}).json
        assert found.get("fits"), found
        _, columns = unpack(server.ask("/api/runs/run/metrics?names=time/rollout,time/update").body)
        for phase in ("rollout", "update"):
            measured = float(np.nanmedian(columns[f"time/{phase}"][-20:]))
            assert found["measured"]["phases"][phase] == pytest.approx(measured, rel=0.25), phase
        longer = server.ask("/api/plan", "POST", {"run": "run", "overrides": ["learn.max_new_tokens=2048"]}).json
        assert longer["measured"]["total"] > found["measured"]["total"]
        assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("*")} == before


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ([], 422, "not a JSON object"),
        ({"run": "none"}, 404, "no such run"),
        ({"run": "a", "overrides": ["model.path=/etc"]}, 422, "cannot be tried here"),
        ({"run": "a", "overrides": ["learn.lr=fast"]}, 422, "learn.lr"),
        ({"run": "a", "overrides": "learn.lr=1"}, 422, "overrides"),
        ({"run": "a", "devices": 10**9}, 422, "devices"),
        ({"run": "a", "device": "abacus"}, 422, "not a known device"),
        ({"run": "a", "device_memory": "much"}, 422, "device_memory"),
        (b"{", 400, "not JSON"),
        (b" " * 70_000, 413, "too long"),
    ],
)
def test_questions_that_cannot_be_answered(tmp_path: Path, body: Any, status: int, says: str) -> None:
    write_run(tmp_path / "runs" / "a")
    with serving(tmp_path / "runs") as server:
        answer = server.ask("/api/plan", "POST", body)
        assert answer.status == status, answer.body
        assert says in answer.json["error"]


def test_new_runs_appear_and_old_ones_go(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    with serving(tmp_path / "runs") as server:
        assert server.ask("/api/runs").json["runs"] == []
        run = write_run(tmp_path / "runs" / "a")
        time.sleep(1.1)
        assert _ids(server) == ["a"]
        run.rename(tmp_path / "gone")
        assert server.ask("/api/runs/a").status == 404
        time.sleep(1.1)
        assert _ids(server) == []


def _ids(client: Client) -> list[str]:
    return [run["id"] for run in client.ask("/api/runs").json["runs"]]


@pytest.mark.slow
def test_two_hundred_runs_are_listed_within_a_second(tmp_path: Path) -> None:
    kinds = [plant(tmp_path / name, name) for name in ("healthy", "running", "failed", "sft")]
    for number in range(200):
        shutil.copytree(kinds[number % 4], tmp_path / "runs" / f"run-{number}", copy_function=os.link)
    with serving(tmp_path / "runs") as server:
        took = []
        for _ in range(5):
            started = time.monotonic()
            assert len(_ids(server)) == 200
            took.append(time.monotonic() - started)
        assert min(took) < 1.0, took  # other work on the machine may take its time
        wait_for(lambda: not any(run.get("partial") for run in server.ask("/api/runs").json["runs"]), 120)
