"""What lost processes wrote stays, and does not grow without end."""

from __future__ import annotations

from pathlib import Path

from trimtab.rollout.external import members
from trimtab.rollout.external.members import keep_log


def test_logs_are_numbered_on_and_of_many_the_oldest_goes(tmp_path: Path) -> None:
    log, folder = tmp_path / "log", tmp_path / "run" / "engines"
    for number in range(1, members.MAX_KEPT_LOGS + 4):
        log.write_text(str(number))
        assert keep_log(log, folder, "vllm") == folder / f"vllm-{number}.log"
        kept = sorted(int(path.read_text()) for path in folder.iterdir())
        assert kept == list(range(max(1, number - members.MAX_KEPT_LOGS + 1), number + 1))


def test_files_of_others_are_neither_counted_nor_removed(tmp_path: Path) -> None:
    log, other = tmp_path / "log", tmp_path / "engines" / "vllm-notes.log"
    log.write_text("1")
    other.parent.mkdir()
    other.write_text("mine")
    assert keep_log(log, other.parent, "vllm").name == "vllm-1.log" and other.read_text() == "mine"
