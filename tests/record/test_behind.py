"""Work behind the training: one at a time, to its end, and no error is lost."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from trimtab.record.behind import WriteBehind


def test_one_piece_of_work_at_a_time() -> None:
    behind, order, go = WriteBehind(), list[str](), threading.Event()

    def first() -> None:
        go.wait(10)
        order.append("first")

    behind.start(first)
    assert behind.busy and not behind.ended
    threading.Timer(0.05, go.set).start()
    behind.start(lambda: order.append("second"))
    assert order[0] == "first", "the second began before the first had ended"
    behind.wait()
    assert order == ["first", "second"] and not behind.busy
    done = behind.take_done()
    assert len(done) == 2 and done[0].end <= done[1].begin and done[0].seconds >= 0.04
    assert behind.take_done() == []


@pytest.mark.parametrize("how", ["wait", "start"])
def test_an_error_is_raised_once_by_whoever_looks_next(how: str) -> None:
    behind = WriteBehind()

    def fail() -> None:
        raise OSError(28, "No space left on device")

    behind.start(fail)
    with pytest.raises(OSError, match="No space left"):
        behind.wait() if how == "wait" else behind.start(lambda: None)
    assert not behind.busy and behind.take_done() == []
    behind.wait()


def test_a_process_does_not_end_before_its_work() -> None:
    program = (
        "import time; from trimtab.record.behind import WriteBehind\n"
        "WriteBehind().start(lambda: (time.sleep(0.5), print('written', flush=True)))"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "written\n"
