"""The first stop signal stops, at once or as soon as it may; repeats change nothing; in the end handlers are as before."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from trimtab.base.signals import (
    STOP_SIGNALS,
    Terminated,
    hold_stops,
    newly_waiting,
    raise_waiting,
    take_signals,
)


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """As a shell starts a program in the foreground; a test that fails kills nobody."""
    before = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_the_first_raises_and_repeats_do_not(signum: int) -> None:
    with take_signals():
        with pytest.raises(KeyboardInterrupt) as raised:
            send(signum)
        assert isinstance(raised.value, Terminated) == (signum != signal.SIGINT)
        for repeat in STOP_SIGNALS:  # of whatever kind
            send(repeat)
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_one_that_comes_while_held_is_raised_at_the_end_of_that(signum: int) -> None:
    done = []
    with take_signals(), pytest.raises(KeyboardInterrupt) as raised:  # noqa: PT012
        with hold_stops():
            send(signum)
            send(signal.SIGTERM)
            done.append("saved")
        done.append("went on")
    assert done == ["saved"]
    first = raised.value.signum if isinstance(raised.value, Terminated) else signal.SIGINT
    assert first == signum


def test_a_hold_holds_while_its_condition_is_true() -> None:
    applying = True
    with take_signals(), pytest.raises(Terminated), hold_stops(lambda: applying):  # noqa: PT012
        send(signal.SIGTERM)
        assert (newly_waiting(), newly_waiting()) == ("SIGTERM", None)
        applying = False
        raise_waiting()
        pytest.fail("went on")
    with pytest.raises(Terminated), take_signals(), hold_stops(lambda: False):
        send(signal.SIGTERM)


def test_an_error_goes_before_a_stop_that_waits() -> None:
    with take_signals(), pytest.raises(ValueError, match="disk"), hold_stops():  # noqa: PT012
        send(signal.SIGTERM)
        raise ValueError("disk")


def test_a_stop_that_somebody_caught_is_raised_again() -> None:
    with take_signals():
        with contextlib.suppress(BaseException):  # a finaliser, a careless callback
            send(signal.SIGTERM)
        with pytest.raises(Terminated):
            raise_waiting()


def test_what_was_ignored_stays_ignored_and_a_handler_of_ones_own_is_called() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: seen.append(signum))
    with take_signals():
        send(signal.SIGHUP)
        with hold_stops():
            send(signal.SIGTERM)
            assert seen == []
        assert seen == [signal.SIGTERM]
        send(signal.SIGTERM)
    assert seen == [signal.SIGTERM] * 2, "it did not stop, so the next is no repeat"


def test_a_block_inside_another_and_one_in_a_thread_change_nothing() -> None:
    with take_signals():
        handler = signal.getsignal(signal.SIGTERM)
        with take_signals():
            assert signal.getsignal(signal.SIGTERM) == handler
        assert signal.getsignal(signal.SIGTERM) == handler
    failures: list[BaseException] = []

    def in_a_thread() -> None:
        try:
            with take_signals(), hold_stops():
                pass
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join(10)
    assert not failures and not thread.is_alive()


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_process_that_was_stopped_ends_as_it_wants_to(signum: int) -> None:
    """Also where repeats come while the interpreter ends."""
    code = f"""
import atexit, os, signal, sys
from trimtab.base.signals import take_signals
signal.signal({signum:d}, signal.default_int_handler if {signum:d} == signal.SIGINT else signal.SIG_DFL)
atexit.register(lambda: os.kill(os.getpid(), {signum:d}))
with take_signals(until_exit=True):
    try:
        os.kill(os.getpid(), {signum:d})
    except KeyboardInterrupt:
        sys.exit(7)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (7, "")
