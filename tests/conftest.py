"""Shared by all tests: one thread (two cores run two workers), quiet libraries, and the tiny models of tests/tiny.py."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import forking
import hypothesis
import pytest
import torch

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background, where nothing could be stopped
    signal.signal(signal.SIGINT, signal.default_int_handler)
# No test depends on time or luck; `HYPOTHESIS_PROFILE=search make test` looks at cases that nobody has seen.
# Without "explain": it traces every line, and Python 3.11 hangs where a timeout's signal comes while it does.
PHASES = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain]
hypothesis.settings.register_profile("repeat", deadline=None, derandomize=True, phases=PHASES)
hypothesis.settings.register_profile("search", deadline=None, max_examples=400, phases=PHASES)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))
if not torch.cuda.is_available():
    # Triton reads this when it is first imported: here, before any test does, it holds for a whole worker.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def patch_language_once() -> None:
    """Triton's interpreter puts its functions into the language for a kernel, and again, at a third of the time, for every
    function that the kernel calls: once is enough."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch, scope, tl = (getattr(interpreter, name, None) for name in ("_patch_lang", "_LangPatchScope", "tl"))
    if not (patch and scope and tl):
        return  # another version

    def patch_where_it_is_whole(fn: Any) -> Any:
        seen = [language for language in (tl, tl.core) if any(value is language for value in fn.__globals__.values())]
        return patch(fn) if not seen or any(tl.core.is_builtin(language.load) for language in seen) else scope()

    interpreter._patch_lang = patch_where_it_is_whole


patch_language_once()
if os.environ.get("EMULATE_CUDA"):
    # Tests marked `cuda` then run on a device that the CPU plays (tests/emulated_cuda), as one of this capability: 9.0.
    import emulated_cuda

    major, minor = map(int, os.environ["EMULATE_CUDA"].split("."))
    played = emulated_cuda.installed((major, minor))
    played.__enter__()


TOGETHER = {
    "vllm": ("tests/rollout/contract/", "tests/invariants/test_engines.py"),
    "commands": (
        "tests/invariants/test_kill_resume.py",
        "tests/base/test_streams.py",
        "tests/invariants/test_seen_from_outside.py",
    ),
}
"""Files that share a process of forking.py. They take longest, and come first."""


def scope(nodeid: str) -> str:
    """What goes to one worker: a file, so that a fixture of its module is made once, or several."""
    return next((name for name, files in TOGETHER.items() if nodeid.startswith(files)), nodeid.partition("::")[0])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = list(TOGETHER)
    items.sort(key=lambda item: first.index(name) if (name := scope(item.nodeid)) in first else len(first))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `-n`, which would deal tests out one by one."""
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByScope(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope(nodeid)

    config.option.loadscopereorder = False  # by number of tests
    return ByScope(config, log)


def pytest_collection_finish() -> None:
    """Modules and collected tests stay to the end. A run looks through all objects for cycles twice, which took most of a tiny
    one's time; what is frozen is not looked through."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()
    forking.close_all()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Not what the user has tuned."""
    os.environ["TRIMTAB_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True)
def no_curves(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture takes most of a second, as long as a tiny run, and so does a report: only tests marked `curve` draw them."""
    if not request.node.get_closest_marker("curve"):
        monkeypatch.setattr("trimtab.observe.look_back.draw_curve", lambda folder, console: None)
        monkeypatch.setattr("trimtab.observe.look_back.draw_report", lambda folder, console, changes=True: None)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a run takes where nobody says how many, whatever the machine; and no run's threads are there in the next test."""
    monkeypatch.setattr("trimtab.run.machine.physical_cores", lambda: 1)
    yield
    if torch.get_num_threads() > 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    from tiny import tiny_tokenizer

    return tiny_tokenizer()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer) -> Path:
    """A tiny Llama as a Hugging Face folder, for everything that starts from a path."""
    from tiny import tiny_model

    from trimtab.model.load import save_model

    folder = tmp_path_factory.mktemp("model")
    save_model(tiny_model("llama"), tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def warm_python() -> str:
    """In place of an interpreter, for tests that run commands (forking.py)."""
    return forking.Warm(sys.executable, ["trimtab.api", "trimtab.cli", "matplotlib.backends.backend_agg"]).python
