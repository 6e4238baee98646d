"""The data of a page: whole, small, and there whatever became of the folder."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.observe.planted import DISTINCT, plant
from tests.observe.planted_parts import plant_samples, write_lines
from trimtab.observe.look import look_at
from trimtab.observe.web.compare import best_of
from trimtab.observe.web.data import report_document, run_data
from trimtab.observe.web.earlier import findings_at
from trimtab.observe.web.findings import findings_of
from trimtab.observe.web.private import last_parts
from trimtab.observe.web.samples import samples
from trimtab.observe.web.traces import trace

KEYS = {
    "id", "name", "state", "stage", "facts", "level", "findings", "last", "at", "verdict", "questions", "steps", "columns",
    "starts", "not_finite", "bands", "smoothing", "phases", "memory", "funnel", "plan", "config", "events", "distributions",
    "samples", "evaluations", "trace", "profile", "missing", "damaged",
}  # fmt: skip


def data(folder: Path, name: str) -> dict[str, Any]:
    return run_data(look_at(plant(folder / name, name)), changes=False)


def values(column: dict[str, Any]) -> np.ndarray:
    kind, dtype = ("f64", "<f8") if "f64" in column else ("f32", "<f4")
    found = np.frombuffer(base64.b64decode(column[kind]), dtype=dtype)
    assert len(found) == column["n"]
    return found


@pytest.mark.parametrize("name", DISTINCT)
def test_every_folder_has_a_page(name: str, tmp_path: Path) -> None:
    run = data(tmp_path, name)
    assert set(run) >= KEYS
    json.dumps(run, allow_nan=False).encode("ascii")
    lengths = {column["n"] for column in run["columns"].values()}
    assert lengths <= {run["steps"]["n"]}
    rules = run["questions"]["wrong"]["rules"]
    assert all(rule["level"] in ("ok", "warn", "bad", "unjudged") for rule in rules) and len(rules) > 50


def test_columns_are_the_metrics_and_what_is_missing_is_nan(tmp_path: Path) -> None:
    run = data(tmp_path, "healthy")
    rows = [json.loads(line) for line in (tmp_path / "healthy" / "metrics.jsonl").read_text().splitlines()]
    assert values(run["steps"]).tolist() == [row["step"] for row in rows]
    for name in ("reward/mean", "eval/pass@1", "time/total"):
        wanted = np.array([row.get(name, np.nan) for row in rows], dtype="<f4")
        np.testing.assert_array_equal(values(run["columns"][name]), wanted)


def test_clocks_are_right_to_the_millisecond(tmp_path: Path) -> None:
    folder = plant(tmp_path / "run", "healthy")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for number, row in enumerate(rows):
        row |= {"time/at": 1.8e9 + 0.001 * number, "run/tokens_total": 2**40 + number}
    write_lines(folder / "metrics.jsonl", rows)
    columns = run_data(look_at(folder), changes=False)["columns"]
    np.testing.assert_allclose(values(columns["time/at"]) - 1.8e9, 0.001 * np.arange(len(rows)), atol=1e-4)
    assert values(columns["run/tokens_total"]).tolist() == [2**40 + number for number in range(len(rows))]
    assert "f32" in columns["reward/mean"]


def test_the_first_screen_of_a_healthy_run(tmp_path: Path) -> None:
    run = data(tmp_path, "healthy")
    asked = run["questions"]
    assert (
        asked["learning"]["note"].startswith("pass@1 on 256 held-out prompts, ±2.")
        and asked["learning"]["unit"] == "share"
    )
    assert asked["bound"]["value"] == "the update" and asked["bound"]["note"] == "51 % of the time"
    assert asked["wrong"]["value"] == "nothing found"
    assert asked["fits"]["note"] == "planned: 54.2 GiB, in the update" and 50 < asked["fits"]["value"] < 56
    assert [row["name"] for row in run["phases"]["rows"]][:2] == ["update", "rollout"]
    assert run["phases"]["rows"][1]["planned"] == pytest.approx(6.866402) and run["phases"]["median_of"] == 149
    assert [step["name"] for step in run["funnel"]] == ["sampled", "with a reward", "trained", "in groups with signal"]
    assert run["bands"]["reward/zero_std_groups"]["text"] == "below 70 %"
    assert [phase["name"] for phase in run["memory"]["phases"] if phase["binds"]] == ["update"]
    sources = {row["key"]: row["source"] for row in run["config"]}
    assert (sources["learn.steps"], sources["learn.lr"], sources["run.token_budget"]) == ("you", "default", "chosen")
    assert run["missing"] == [
        {"what": "profile", "text": "No step was profiled: start the run with --profile-steps 3:5."}
    ]


def test_starts_are_marked_and_what_is_not_finite_is_named(tmp_path: Path) -> None:
    assert data(tmp_path, "resumed")["starts"] == [91] and data(tmp_path, "healthy")["starts"] == []
    assert data(tmp_path, "hostile")["not_finite"] == {"policy/grad_norm": [10], "policy/loss": [10]}


def test_findings_are_those_of_the_rows_until_then(tmp_path: Path) -> None:
    """A run that goes wrong after two thirds: nothing was found before, and what is found since is what the doctor says."""
    folder = plant(tmp_path / "run", "healthy")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if row["step"] > 100:
            row |= {"reward/failed": 0.4 * row["run/samples"]}
    write_lines(folder / "metrics.jsonl", rows)
    look = look_at(folder)
    earlier = run_data(look, changes=False)["earlier"]
    assert len(earlier) == 20 and earlier[-1]["step"] < 150
    assert [look for look in earlier if look["step"] <= 100 and look["findings"]] == []
    assert all(look["findings"] for look in earlier if look["step"] > 130)
    assert findings_at(look, 150) == findings_of(look.done.findings) != []


def test_values_whose_squares_are_no_numbers_are_judged(tmp_path: Path) -> None:
    folder = plant(tmp_path / "run", "healthy")
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows[-30:]:
        row |= {"reward/mean": -1e308, "reward/std": 1e308, "policy/grad_norm": 1e308}
    write_lines(folder / "metrics.jsonl", rows)
    run = run_data(look_at(folder), changes=False)
    assert run["level"] == "bad" and any(finding["rule"] == "reward_falls" for finding in run["findings"])
    assert values(run["columns"]["policy/grad_norm"])[-1] == 1e308


def test_what_is_damaged_is_named_and_the_rest_is_there(tmp_path: Path) -> None:
    run = data(tmp_path, "damaged")
    assert [(item["file"], item["line"]) for item in run["damaged"][:2]] == [
        ("metrics.jsonl", 41),
        ("metrics.jsonl", 61),
    ]
    named = {item["file"] for item in run["damaged"]}
    assert named >= {"run.json", "plan.json", "now.json", "events.jsonl", "samples/index.jsonl", "distributions.jsonl"}
    assert len(run["samples"]["rows"]) > 5 and run["trace"]["spans"] and run["state"]["kind"] == "finished"


def test_an_old_folder_says_what_it_lacks(tmp_path: Path) -> None:
    run = data(tmp_path, "old_version")
    assert {item["what"] for item in run["missing"]} == {"distributions", "events", "profile"}
    assert run["samples"]["index"] and run["samples"]["left_out"] == 0 and run["facts"]["started_at"] is None
    sources = {row["key"]: row["source"] for row in run["config"]}
    assert sources["learn.a_key_of_then"] == "you" and sources["learn.max_grad_norm"] == "default"


def test_samples_keep_to_the_budget_and_miss_nothing_that_matters(tmp_path: Path) -> None:
    look = look_at(plant(tmp_path / "run", "healthy"))
    whole = samples(look)
    assert whole["left_out"] == 0
    few = samples(look, most_rows=220)
    kept = {key: len(rows) for key, rows in few["rows"].items()}
    assert few["left_out"] == few["total"] - sum(kept.values()) and sum(kept.values()) <= 220
    assert {"train:1", "train:150", "eval:0", "eval:150"} <= set(kept)
    failed = {
        (row["step"], row["prompt_id"], row["sample"])
        for rows in whole["rows"].values()
        for row in rows
        if row["failure"]
    }
    told = {
        (row["step"], row["prompt_id"], row["sample"])
        for rows in few["rows"].values()
        for row in rows
        if row["failure"]
    }
    assert failed and told == failed
    small = samples(look, most_bytes=20_000)
    assert sum(len(json.dumps(row)) for rows in small["rows"].values() for row in rows) <= 20_000


def test_a_file_of_samples_that_an_index_names_elsewhere_is_not_read(tmp_path: Path) -> None:
    folder = plant(tmp_path / "run", "one_step")
    (tmp_path / "secret").write_text('{"step": 1, "reward": 1}\n')
    with (folder / "samples" / "index.jsonl").open("a") as file:
        file.write(json.dumps({"step": 7, "kind": "train", "file": "../secret", "rows": 1, "bytes": 20}) + "\n")
    assert "train:7" not in samples(look_at(folder))["rows"]


def test_a_long_trace_keeps_whole_steps_and_counts_the_rest(tmp_path: Path) -> None:
    folder = plant(tmp_path / "run", "healthy")
    whole, some = trace(folder), trace(folder, most=500)
    assert whole is not None and some is not None
    assert whole["left_out"] == 0 and some["left_out"] == len(whole["spans"]) - len(some["spans"]) > 0
    assert whole["tracks"][0] == "phases" and {span[4] for span in some["spans"]} >= {1, 2}
    start = whole["spans"][0][2] / 1e6
    part = trace(folder, start, start + 40)
    assert part is not None and 0 < len(part["spans"]) < len(whole["spans"])
    assert set(whole["counters"]) == {"running sequences", "KV pages"}


def test_runs_are_compared_by_what_differs(tmp_path: Path) -> None:
    looks = [
        look_at(plant(tmp_path / f"{name}{seed}", name, seed))
        for name, seed in (("healthy", 0), ("healthy", 1), ("update_small", 0))
    ]
    config = (tmp_path / "healthy1" / "config.yaml").read_text()
    (tmp_path / "healthy1" / "config.yaml").write_text(config.replace("  seed: 0", "  seed: 1"))
    looks[1] = look_at(tmp_path / "healthy1")
    found = report_document(looks, changes=False)["compare"]
    assert [row["key"] for row in found["differ"]] == ["learn.seed", "run.token_budget"] and found["equal"] > 100
    assert found["bands"] == [{"runs": found["runs"][:2], "text": "2 seeds"}]
    table = {row["label"]: row for row in found["table"]}
    assert table["held-out accuracy"]["best"] is None and table["seconds a step"]["best"] is None
    assert table["seconds a step"]["values"][2] > 20


@pytest.mark.parametrize(
    ("measured", "best"),
    [
        ([(0.8, 0.02), (0.82, 0.02)], None),
        ([(0.8, 0.02), (0.9, 0.02)], 1),
        ([(0.8, 0.0), (None, 0.0)], None),
        ([(1.0, 0.0), (1.0, 0.0)], None),
    ],
)
def test_the_best_is_one_only_beyond_its_error(measured: list[tuple[float | None, float]], best: int | None) -> None:
    assert best_of(measured, True) == best


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("/home/ann/models/qwen", "qwen"),
        ("cannot open '/data/a b/x.json': gone", "cannot open 'a b/x.json': gone"),
        ("~/runs/one and C:\\Users\\ann\\x.txt", "one and x.txt"),
        ("openai/gsm8k:main", "openai/gsm8k:main"),
        ("reward/mean is 3/4", "reward/mean is 3/4"),
        ("task:arithmetic", "task:arithmetic"),
    ],
)
def test_private_texts_have_the_last_parts_of_paths(text: str, shown: str) -> None:
    assert last_parts(text) == shown


def test_a_private_page_names_no_host_folder_or_command(tmp_path: Path) -> None:
    folder = plant(tmp_path / "run", "failed")
    config = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(config.replace("Qwen/Qwen2.5-1.5B-Instruct", "/home/ann/models/qwen"))
    with (folder / "events.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {"at": 1.0, "step": 3, "level": "warn", "kind": "note", "text": "planted-host: see /home/ann/log"}
            )
            + "\n"
        )
    text = json.dumps(report_document([look_at(folder)], private=True, changes=False))
    for secret in ("/home/ann", "planted-host", "gsm8k.yaml", str(tmp_path)):
        assert secret not in text, secret
    open_text = json.dumps(report_document([look_at(folder)], changes=False))
    assert "/home/ann/models/qwen" in open_text and "planted-host" in open_text


def test_many_steps_and_samples_stay_small_and_quick(tmp_path: Path) -> None:
    """A tenth of what the slow test has."""
    _large(tmp_path, steps=1_000, size=20_000_000, most_seconds=15)


@pytest.mark.slow
def test_ten_thousand_steps_and_a_gigabyte_of_samples(tmp_path: Path) -> None:
    _large(tmp_path, steps=10_000, size=1_000_000_000, most_seconds=40)


def _large(tmp_path: Path, steps: int, size: int, most_seconds: float) -> None:
    folder = plant_samples(plant(tmp_path / "run", "ten_thousand" if steps == 10_000 else "healthy"), steps, size)
    begun = time.monotonic()
    document = report_document([look_at(folder)], changes=False)
    assert time.monotonic() - begun < most_seconds
    found = document["runs"][0]["samples"]
    assert sum(len(json.dumps(row)) for kept in found["rows"].values() for row in kept) < 9_000_000
    assert found["left_out"] > 0 and len(json.dumps(document)) < 40_000_000
