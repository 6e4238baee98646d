"""Mistakes in naming a reward are found before the run starts, with what to write instead."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from trimtab.base.errors import RewardError
from trimtab.config.schema import RewardPart
from trimtab.reward import load
from trimtab.reward.scorer import Scorer

FILES = {
    "good.py": "from helper import VALUE\ndef score(completions):\n    return [VALUE] * len(completions)\n",
    "helper.py": "VALUE = 2.5\n",
    "broken.py": "def score(completions):\n    return [1.0\n",
    "failing.py": "raise RuntimeError('no licence')\n",
    "quits.py": "import sys\nsys.exit(0)\n",
    "dies.py": "import os\nos._exit(5)\n",
    "needs.py": "import no_such_library\n",
    "math.py": "def score(completions):\n    return [7.0] * len(completions)\n",
    "shapes.py": """def one(completions, /):
    pass
def two(completions, scale):
    pass
not_callable = 1
class Score:
    def __call__(self, completions):
        return [1.0] * len(completions)
""",
    "pack/__init__.py": "",
    "pack/inner.py": "def score(completions):\n    return [3.0] * len(completions)\n",
}

WRONG = {
    "exact_macth": r"no built-in reward 'exact_macth'. Did you mean 'exact_match'",
    "zzz": r"Available: exact_match, judge, length, math",
    "good.py": r"Write good.py:FUNCTION",
    "pack.inner.score": r"Write pack.inner:score",
    "good.py:": r"Write file.py:function or package.module:function",
    "godo.py:score": r"no file .*godo.py. Did you mean 'good.py'",
    "good.py:scor": r"no 'scor' in it. Did you mean 'score'",
    "pack.inner:scores": r"Did you mean 'score'",
    "pack.outer:score": r"no module 'pack.outer'.*pack/outer.py:score",
    "nowhere:score": r"no module 'nowhere'",
    "broken.py:score": r"broken.py, line 2: '\[' was never closed",
    "failing.py:score": r"(?s)cannot be imported.*failing.py\", line 1.*RuntimeError: no licence",
    "quits.py:score": r"(?s)cannot be imported.*SystemExit",
    "dies.py:score": r"importing the reward functions ended its process: exit status 5",
    "needs.py:score": r"(?s)needs.py\", line 1.*No module named 'no_such_library'",
    "shapes.py:not_callable": r"is int, not a function",
    "shapes.py:Score": r"Score is a class, not a function. Make an instance in its file, such as score = Score\(\)",
    "shapes.py:one": r"completions cannot be passed by name",
    "object:missing": r"made from Python with a function object 'missing'.*Name a file, or pass the object",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("fn", WRONG)
def test_a_wrong_name_is_an_error_with_its_fix(folder, fn):
    with pytest.raises(RewardError, match=WRONG[fn]):
        Scorer([RewardPart(fn=fn)], workers=1, base_dir=folder)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("reward-")]


@pytest.mark.parametrize(
    ("fn", "args", "message"),
    [
        ("exact_match", {"colum": "x"}, r"takes no argument 'colum'. Did you mean 'column'"),
        ("regex", {}, r"regex needs a value for pattern"),
        ("regex", {"pattern": "(x"}, r"'\(x' is not a regular expression"),
        ("regex", {"pattern": "x", "mode": "fully"}, r"mode is 'fully'"),
        ("length", {"max_tokens": 5, "free_tokens": 5}, r"free_tokens"),
        ("length", {"max_tokens": "many"}, r"reward.args"),
        ("task", {"name": "x"}, r"takes no argument 'name'"),
        ("shapes.py:two", {"scael": 1}, r"takes no argument 'scael'. Did you mean 'scale'"),
    ],
)
def test_wrong_args_are_an_error_with_their_fix(folder, fn, args, message):
    with pytest.raises(RewardError, match=message):
        Scorer([RewardPart(fn=fn, args=args)], workers=1, base_dir=folder)


def test_two_parts_of_one_name_are_an_error(folder):
    parts = [RewardPart(fn="good.py:score"), RewardPart(fn="pack.inner:score")]
    with pytest.raises(RewardError, match="two parts are called 'score'"):
        Scorer(parts, workers=1, base_dir=folder)


def test_an_object_that_cannot_be_pickled_is_an_error(folder):
    lock = threading.Lock()
    with pytest.raises(RewardError, match="'f' cannot be sent to a worker process"):
        Scorer([RewardPart(fn="object:f")], workers=1, base_dir=folder, functions={"f": lambda completions: lock})


def test_a_file_may_import_its_neighbours_and_have_the_name_of_a_library(folder, group):
    names = {
        "good.py:score": 2.5,
        "math.py:score": 7.0,
        "pack.inner:score": 3.0,
        str(folder / "good.py") + ":score": 2.5,
    }
    parts = [RewardPart(fn=fn, name=f"part{i}") for i, fn in enumerate(names)]
    given = group("a")
    with Scorer(parts, workers=1, base_dir=folder) as scorer:
        scorer.submit(given)
        scorer.collect()
    assert list(given.trajectories[0].rewards.values()) == list(names.values())


def test_a_file_may_lie_in_the_current_folder(folder, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(folder)
    source = load.locate("good.py:score", tmp_path_factory.mktemp("elsewhere"), {})
    assert source.place == str(folder / "good.py")


def test_the_worker_module_imports_neither_torch_nor_pydantic():
    code = "import trimtab.reward.worker, sys; print([m for m in ('torch', 'pydantic', 'numpy') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
