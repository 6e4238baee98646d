"""What a trainer starts ends with everything that it started."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from trimtab.processes import how_it_ended, kill_all

STARTS_ANOTHER = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
if {stays}: time.sleep(600)
"""


@pytest.mark.parametrize("stays", [True, False])
def test_nothing_is_left_of_a_process_that_runs_or_has_ended(stays: bool) -> None:
    command = [sys.executable, "-c", STARTS_ANOTHER.format(stays=stays)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    child = psutil.Process(int(process.stdout.readline()))
    if not stays:
        assert process.wait(60) == 0 and child.is_running()
    kill_all(process)
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE:  # the test's own limit is the deadline
        time.sleep(0.01)
    assert process.returncode is not None
    kill_all(process)


def test_endings_are_told_in_words() -> None:
    assert how_it_ended(3) == "exit status 3"
    assert "SIGTERM" in how_it_ended(-15) and "memory" not in how_it_ended(-15)
    assert "out of memory" in how_it_ended(-9)
