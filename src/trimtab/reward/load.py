"""From what the configuration names to a function that can be called.

Guarantees: every mistake that can be seen without data is a RewardError before the run starts, with what to write
instead: an unknown built-in, a missing file, module or function, a syntax error, an argument that is not taken.
`locate` runs in the trainer and imports none of the user's code; `load` runs in a worker.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from trimtab.data.suggest import did_you_mean
from trimtab.errors import RewardError

GIVEN = ("prompts", "completions", "completion_ids")
"""Arguments that every call offers, besides the row's columns."""


@dataclass(frozen=True)
class Source:
    """Where a reward function is found. Travels to the workers."""

    kind: Literal["builtin", "file", "module", "object", "model"]
    place: str
    """Absolute path of the file, dotted name of the module, or what a reward model is loaded from."""
    name: str
    pickled: bytes = b""
    """An object's cloudpickle."""

    def __str__(self) -> str:
        if self.kind == "model":
            return f"model:{self.place}"
        return f"{self.place}:{self.name}" if self.place else self.name


@dataclass(frozen=True)
class Function:
    """A loaded reward function with its fixed arguments."""

    call: Callable[..., Any]
    args: dict[str, Any]
    accepts: frozenset[str] | None
    """Arguments it names; None: it takes any."""
    needs: frozenset[str]
    """Columns that a row must have."""

    def __call__(self, offered: Mapping[str, Any]) -> Any:
        arguments = {**offered, **self.args}
        if self.accepts is not None:
            arguments = {key: value for key, value in arguments.items() if key in self.accepts}
        return self.call(**arguments)


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint: the closest known names, otherwise all of them."""
    names = sorted(known)
    everything = f"There is: {', '.join(names[:20])}." if names else "There is none."
    return did_you_mean(word, names).strip() or everything


def locate(fn: str, base_dir: Path, functions: Mapping[str, Callable[..., Any]]) -> Source:
    """Find what `fn` names: a built-in, `object:NAME`, `model:PATH`, `file.py:function` or `package.module:function`."""
    if fn.startswith("model:"):
        path = fn.removeprefix("model:")
        if not path:
            raise RewardError("reward.fn: 'model:' names no model. Write model:FOLDER, such as model:runs/rm/final")
        local = Path(path).expanduser()
        local = local if local.is_absolute() else base_dir / local
        place = str(local) if local.is_dir() else path
        return Source("model", place, "reward_model")
    place, colon, name = fn.rpartition(":")
    if not colon:
        return _locate_builtin(fn)
    if not name or not place:
        raise RewardError(f"reward.fn: {fn!r} is not of the form file.py:function or package.module:function")
    if place == "object":
        return _locate_object(name, functions)
    if place.endswith(".py") or os.sep in place:
        return Source("file", str(_find_file(place, base_dir)), name)
    return Source("module", place, name)


def _locate_builtin(fn: str) -> Source:
    from trimtab.reward.builtins import BUILTINS

    if fn in BUILTINS:
        return Source("builtin", "", fn)
    if fn.endswith(".py"):
        raise RewardError(f"reward.fn: {fn!r} names a file but no function. Write {fn}:FUNCTION")
    if "." in fn:
        module, _, name = fn.rpartition(".")
        raise RewardError(f"reward.fn: {fn!r} names no function. Write {module}:{name}")
    raise RewardError(
        f"reward.fn: there is no built-in reward {fn!r}. {nearest(fn, BUILTINS)} "
        "For a function of your own write file.py:function or package.module:function"
    )


def _locate_object(name: str, functions: Mapping[str, Callable[..., Any]]) -> Source:
    import cloudpickle

    if name not in functions:
        raise RewardError(f"reward.fn: no function object {name!r} was passed. {nearest(name, functions)}")
    if not callable(functions[name]):
        raise RewardError(f"reward {name!r} is {type(functions[name]).__name__}, not a function")
    try:
        return Source("object", "", name, cloudpickle.dumps(functions[name]))
    except Exception as error:  # whatever a captured object's own __reduce__ raises
        raise RewardError(
            f"reward {name!r} cannot be sent to a worker process: {error}. It refers to something that cannot be "
            "pickled (a lock, an open file, a model); create that inside the function, or put the function into a file"
        ) from error


def _find_file(place: str, base_dir: Path) -> Path:
    path = Path(place).expanduser()
    tried = list(dict.fromkeys((folder / path).resolve() for folder in (base_dir, Path.cwd())))
    for candidate in tried:
        if candidate.is_file():
            return candidate
    beside = {other.name for folder in {candidate.parent for candidate in tried} for other in folder.glob("*.py")}
    where = " nor ".join(str(candidate) for candidate in tried)
    raise RewardError(f"reward.fn: there is no file {where}. {nearest(path.name, beside)}")


def load(source: Source, args: dict[str, Any]) -> Function:
    """Import the function and check its signature against `args`. Runs the user's module code."""
    if source.kind == "builtin":
        from trimtab.reward.builtins import BUILTINS

        function = describe(BUILTINS[source.name], args, source)
        function({name: [] for name in GIVEN})  # finds bad values of args and missing packages
        if source.name == "judge":
            from trimtab.reward.judge.reward import columns_needed

            function = replace(function, needs=columns_needed(function.args))
        return function
    try:
        call = pickle.loads(source.pickled) if source.kind == "object" else _attribute(_module(source), source)
    except RewardError:
        raise
    except SyntaxError as error:
        text = (error.text or "").rstrip()
        raise RewardError(f"reward {source}: {error.filename}, line {error.lineno}: {error.msg}\n{text}") from error
    except BaseException as error:  # a module may also call sys.exit
        raise RewardError(f"reward {source} cannot be imported:\n{user_traceback(error)}") from error
    if not callable(call):
        raise RewardError(f"reward {source} is {type(call).__name__}, not a function")
    return describe(call, args, source)


def _module(source: Source) -> ModuleType:
    if source.kind == "file":
        return _module_of_file(Path(source.place))
    try:
        return importlib.import_module(source.place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source.place}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise RewardError(
            f"reward {source}: there is no module {error.name!r} in the configuration's folder, the current folder or "
            f"among the installed packages. For a file write {source.place.replace('.', '/')}.py:{source.name}"
        ) from error


def _module_of_file(path: Path) -> ModuleType:
    """Import a file as Python runs a script: its folder comes first on the path. One file is one module."""
    for module in list(sys.modules.values()):
        if getattr(module, "__file__", None) == str(path) and module.__name__ != "__main__":
            return module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem not in sys.modules else f"trimtab_reward_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, source: Source) -> Any:
    if hasattr(module, source.name):
        return getattr(module, source.name)
    functions = (name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
    raise RewardError(f"reward {source}: there is no {source.name!r} in it. {nearest(source.name, functions)}")


def describe(call: Callable[..., Any], args: dict[str, Any], source: Source) -> Function:
    """What a function takes, from its signature; an entry of `args` that it does not take is an error."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:  # some functions written in C have no signature
        return Function(call, args, None, frozenset())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional:
        raise RewardError(f"reward {source}: {', '.join(positional)} cannot be passed by name. Remove the / from it")
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in args:
        # What a built-in does not name are columns, so an unnamed argument is a misspelt one.
        if key not in named and (not takes_any or source.kind == "builtin"):
            known = [name for name in named if name not in GIVEN]
            raise RewardError(f"reward.args: {source} takes no argument {key!r}. {nearest(key, known)}")
    missing = {name for name, p in named.items() if p.default is p.empty and name not in args and name not in GIVEN}
    if source.kind == "builtin":
        if missing:
            raise RewardError(f"reward.args: {source} needs a value for {', '.join(sorted(missing))}")
        # Options come from `args` alone: a column of the data may have an option's name by chance.
        args = {name: p.default for name, p in named.items() if p.kind is p.KEYWORD_ONLY} | args
        missing = {args["column"]} if "column" in args else set()
    return Function(call, args, None if takes_any else frozenset(named), frozenset(missing))


def user_traceback(error: BaseException) -> str:
    """The traceback from the first frame that is the user's."""
    ours = os.path.dirname(__file__) + os.sep
    frame = error.__traceback__
    while frame is not None and (
        frame.tb_frame.f_code.co_filename.startswith((ours, "<frozen importlib", os.path.dirname(importlib.__file__)))
    ):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__)).rstrip()
