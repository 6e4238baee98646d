"""A chat template is tried in a process of its own before it is used: it is foreign code, and may loop or write without end.

The sandbox in which templates run bounds a single range, not loops within loops, and a thread that loops cannot be ended. A child
that is forked can: it renders, and exits. What it finds besides (an error of the template) is left to the rendering that follows.
"""

from __future__ import annotations

import os
import resource
import signal
import time
import warnings
from collections.abc import Callable, Sequence

from trimtab.base.errors import DataError
from trimtab.base.units import GIB

MAX_TEXT_CHARACTERS = 10_000_000
"""Characters of a text that becomes a prompt or an example: several times the longest context there is. More take minutes to
tokenise before they are found to be too long."""
TRIAL_TIMEOUT_S = 10.0
TRIAL_TIMEOUT_S_EACH = 0.1
"""Time that a template has: a rendering takes a millisecond or so."""
MAX_RENDER_BYTES = 4 * GIB
"""Bytes that a rendering may need besides what the process has."""
TEMPLATE_FIX = (
    "Name another tokenizer (model.tokenizer), correct its chat_template, or write data.chat_template: never."
)
_LONG, _MEMORY = 3, 4
_POLL_S = 0.002


def try_template(
    renderings: Sequence[Callable[[], object]], source_name: str, seconds: float = TRIAL_TIMEOUT_S
) -> None:
    """Render them all in a child; a DataError where that takes too long, too much memory, or gives too long a text."""
    if not renderings or not hasattr(os, "fork"):
        return
    seconds += TRIAL_TIMEOUT_S_EACH * len(renderings)
    with warnings.catch_warnings(action="ignore"):  # of threads, which the child has none of and does not wait for
        child = os.fork()
    if child == 0:
        os._exit(_render(renderings, seconds))
    status = _wait(child, time.monotonic() + seconds)
    what = f"{source_name}: the tokenizer's chat template"
    if status is None or status == -signal.SIGXCPU:
        raise DataError(f"{what} does not finish: it took more than {seconds:.0f} s. {TEMPLATE_FIX}")
    if status == _LONG:
        raise DataError(
            f"{what} writes more than {MAX_TEXT_CHARACTERS:,} characters for one conversation. {TEMPLATE_FIX}"
        )
    if status == _MEMORY or status < 0:
        raise DataError(
            f"{what} needs more than {MAX_RENDER_BYTES / GIB:.0f} GiB to render a conversation. {TEMPLATE_FIX}"
        )


def _render(renderings: Sequence[Callable[[], object]], seconds: float) -> int:
    """The child: its exit status."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(
            resource.RLIMIT_CPU, (int(time.process_time() + seconds) + 2, hard)
        )  # if the parent is killed
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = _address_space() + MAX_RENDER_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
        for render in renderings:
            if len(str(render())) > MAX_TEXT_CHARACTERS:
                return _LONG
    except MemoryError:
        return _MEMORY
    except BaseException as error:
        return _MEMORY if isinstance(error.__cause__, MemoryError) else 1
    return 0


def _address_space() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _wait(child: int, deadline: float) -> int | None:
    """The child's exit status, less than 0 for a signal; None where it had to be killed."""
    try:
        while time.monotonic() < deadline:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                child = 0
                return os.waitstatus_to_exitcode(status)
            time.sleep(_POLL_S)
        return None
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
