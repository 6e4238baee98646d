"""Live: rows arrive while they are written, a lost connection loses none, and Ctrl-C ends it all."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.web.serving import Client, append, command, serving, wait_for, write_run

LIVE_S = 2.0
"""A row that is written has to be on the page after so long."""


def test_a_row_arrives_within_two_seconds(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a")
    with serving(tmp_path / "runs") as server:
        reader = server.follow("/api/runs/a/events")
        assert reader.steps(3)[0] == [1, 2, 3]
        for step in range(4, 8):
            written = time.monotonic()
            append(run, step)
            assert reader.steps(step)[0] == [step]
            assert time.monotonic() - written < LIVE_S
        reader.close()
        wait_for(lambda: server.app.state.served.streams == 0)


def test_a_line_is_sent_when_it_is_whole(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a", 1)
    with serving(tmp_path / "runs") as server:
        reader = server.follow("/api/runs/a/events")
        reader.steps(1)
        with (run / "metrics.jsonl").open("ab", buffering=0) as file:
            file.write(b'{"step": 2, "rew')
            time.sleep(1.3)
            file.write(b'ard/mean": 0.5}\n')
            message = reader.next("rows")
        assert message["data"]["rows"] == [{"step": 2, "reward/mean": 0.5}]
        reader.close()


def test_a_step_and_its_evaluation_are_one_row(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a", 2)
    with serving(tmp_path / "runs") as server:
        reader = server.follow("/api/runs/a/events")
        reader.steps(2)
        (run / "metrics.jsonl").open("ab").write(b'{"step": 2, "eval/pass@1": 0.75}\n')
        row = reader.next("rows")["data"]["rows"][0]
        assert row == {"step": 2, "time/total": 1.0, "reward/mean": 0.2, "eval/pass@1": 0.75}
        reader.close()


def test_a_reconnect_loses_none_and_repeats_none(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a", 5)
    with serving(tmp_path / "runs") as server:
        place = server.ask("/api/runs/a").json["live"]
        seen: list[int] = []
        for step in range(6, 30, 4):
            append(run, step, step + 1)
            reader = server.follow("/api/runs/a/events", last_event_id=place)
            found, place = reader.steps(step + 1)
            seen += found
            reader.close()
            append(run, step + 2, step + 3)  # while nobody is connected
        reader = server.follow(f"/api/runs/a/events?from={place}")
        seen += reader.steps(step + 3)[0]
        reader.close()
    assert seen == list(range(6, step + 4))


def test_a_replaced_file_starts_again(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a", 9)
    with serving(tmp_path / "runs") as server:
        reader = server.follow("/api/runs/a/events")
        _, place = reader.steps(9)
        aside = run / "aside"
        aside.write_bytes(b"".join((run / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:4]))
        aside.rename(run / "metrics.jsonl")  # what a resume does
        reader.next("restart")
        assert reader.steps(4)[0] == [1, 2, 3, 4]
        reader.close()
        again = server.follow("/api/runs/a/events", last_event_id=place)
        again.next("restart")
        assert again.steps(4)[0] == [1, 2, 3, 4]
        again.close()


def test_states_and_events_are_sent(tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "a")
    with serving(tmp_path / "runs") as server:
        reader = server.follow("/api/runs/a/events")
        assert reader.next("now")["data"]["kind"] == "running"
        event = {"at": 1.5, "step": 3, "level": "warn", "kind": "note", "text": "</script>\u2028\r x", "data": {}}
        (run / "events.jsonl").write_text(json.dumps(event) + "\n")
        assert reader.next("event")["data"] == event
        (run / "final").mkdir()
        while (state := reader.next("now")["data"])["kind"] != "finished":
            pass
        assert state["text"] == "finished after 3 steps"
        reader.close()


def test_ctrl_c_ends_within_a_second_with_three_pages_open(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a")
    with command(tmp_path / "runs") as server:
        readers = [Client(server.port).follow("/api/runs/a/events") for _ in range(3)]
        for reader in readers:
            reader.steps(3)
        took = server.interrupt(10)
        assert took < 1.5, took  # a second, and what a busy machine adds
        assert server.process.returncode == 0
        for reader in readers:
            assert reader.ended.wait(5)
            reader.close()
