"""From what the configuration names to the user's own object: a function, a class.

Guarantees: whatever is wrong with a name or with the code behind it is told with what to write instead, before the run starts.
`locate` runs in the trainer and imports none of the user's code; `import_object` runs in a worker.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from trimtab.base.errors import RewardError, TrimtabError, cut
from trimtab.base.suggestions import near_or_all

MAX_LINE_CHARACTERS = 500
"""Characters of an error in one line."""


@dataclass(frozen=True)
class UserCode:
    """Where a user's object is found. Travels to the workers."""

    kind: Literal["builtin", "file", "module", "object", "model", "environment"]
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
class Naming:
    """How errors speak of what is named."""

    key: str
    """Key of the configuration."""
    what: str
    form: str
    """What the name stands for."""
    error: type[TrimtabError]


REWARD = Naming("reward.fn", "reward", "function", RewardError)


def locate_object(
    fn: str, base_dir: Path, objects: Mapping[str, Callable[..., Any]], builtins: Collection[str], naming: Naming
) -> UserCode:
    """Find what `fn` names: a built-in, `object:NAME`, `file.py:name` or `package.module:name`."""
    place, colon, name = fn.rpartition(":")
    if not colon:
        return _locate_builtin(fn, builtins, naming)
    if not name or not place:
        form = naming.form
        raise naming.error(f"{naming.key}: got {fn!r}. Write file.py:{form} or package.module:{form}")
    if place == "object":
        return _locate_given(name, objects, naming)
    if place.endswith(".py") or os.sep in place:
        return UserCode("file", str(_find_file(place, base_dir, naming)), name)
    return UserCode("module", place, name)


def _locate_builtin(fn: str, builtins: Collection[str], naming: Naming) -> UserCode:
    if fn in builtins:
        return UserCode("builtin", "", fn)
    if fn.endswith(".py"):
        raise naming.error(f"{naming.key}: {fn!r} names a file but no {naming.form}. Write {fn}:{naming.form.upper()}")
    if "." in fn:
        module, _, name = fn.rpartition(".")
        raise naming.error(f"{naming.key}: {fn!r} names no {naming.form}. Write {module}:{name}")
    own = f"For a {naming.form} of your own write file.py:{naming.form} or package.module:{naming.form}"
    if not builtins:
        raise naming.error(f"{naming.key}: {fn!r} names no {naming.form}. {own}")
    raise naming.error(f"{naming.key}: there is no built-in {naming.what} {fn!r}. {near_or_all(fn, builtins)} {own}")


def _locate_given(name: str, objects: Mapping[str, Callable[..., Any]], naming: Naming) -> UserCode:
    import cloudpickle

    if name not in objects:
        if not objects:
            raise naming.error(
                f"{naming.key}: this config was made from Python with a {naming.form} object {name!r} that it cannot hold. "
                "Name a file, or pass the object."
            )
        raise naming.error(f"{naming.key}: no {naming.form} object {name!r} was passed. {near_or_all(name, objects)}")
    if not callable(objects[name]):
        raise naming.error(f"{naming.what} {name!r} is {type(objects[name]).__name__}, not a {naming.form}")
    try:
        return UserCode("object", "", name, cloudpickle.dumps(objects[name]))
    except Exception as error:  # whatever a captured object's own __reduce__ raises
        raise naming.error(
            f"{naming.what} {name!r} cannot be sent to a worker process: {error}. It refers to something that cannot be "
            f"pickled (a lock, an open file, a model); create that inside the {naming.form}, or put the {naming.form} into a file"
        ) from error


def _find_file(place: str, base_dir: Path, naming: Naming) -> Path:
    path = Path(place).expanduser()
    tried = list(dict.fromkeys((folder / path).resolve() for folder in (base_dir, Path.cwd())))
    for candidate in tried:
        if candidate.is_file() and candidate.suffix != ".py":
            raise naming.error(f"{naming.key}: {candidate} does not end in .py. Rename it to {candidate.name}.py")
        if candidate.is_file():
            return candidate
    beside = {other.name for folder in {candidate.parent for candidate in tried} for other in folder.glob("*.py")}
    where = " nor ".join(str(candidate) for candidate in tried)
    raise naming.error(f"{naming.key}: there is no file {where}. {near_or_all(path.name, beside)}")


def import_object(source: UserCode, naming: Naming) -> Any:
    """The object itself, which can be called. Runs the user's module code."""
    try:
        found = pickle.loads(source.pickled) if source.kind == "object" else _attribute(source, naming)
    except naming.error:
        raise
    except SyntaxError as error:
        text = (error.text or "").rstrip()
        raise naming.error(
            f"{naming.what} {source}: {error.filename}, line {error.lineno}: {error.msg}\n{text}"
        ) from error
    except BaseException as error:  # a module may also call sys.exit
        raise naming.error(f"{naming.what} {source} cannot be imported:\n{user_traceback(error)}") from error
    if not callable(found):
        raise naming.error(f"{naming.what} {source} is {type(found).__name__}, not a {naming.form}")
    return found


def _attribute(source: UserCode, naming: Naming) -> Any:
    module = _module(source, naming)
    if hasattr(module, source.name):
        return getattr(module, source.name)
    names = (name for name, value in vars(module).items() if callable(value) and not name.startswith("_"))
    raise naming.error(f"{naming.what} {source}: there is no {source.name!r} in it. {near_or_all(source.name, names)}")


def _module(source: UserCode, naming: Naming) -> ModuleType:
    if source.kind == "file":
        return _module_of_file(Path(source.place))
    try:
        return importlib.import_module(source.place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{source.place}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise naming.error(
            f"{naming.what} {source}: there is no module {error.name!r} in the configuration's folder, the current folder or "
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


def one_line_error(error: BaseException) -> str:
    """An error in one line, also where it cannot say what it is."""
    try:
        said = str(error)
    except Exception:
        said = "its message cannot be shown"
    return cut(f"{type(error).__name__}: {said}".splitlines()[0], MAX_LINE_CHARACTERS)


def user_traceback(error: BaseException) -> str:
    """The traceback from the first frame that is the user's."""
    package = os.path.dirname(os.path.dirname(__file__))
    ours = tuple(os.path.join(package, *room, "") for room in (["reward"], ["workers"], ["rollout", "conversations"]))
    frame = error.__traceback__
    while frame is not None and (
        frame.tb_frame.f_code.co_filename.startswith((*ours, "<frozen importlib", os.path.dirname(importlib.__file__)))
    ):
        frame = frame.tb_next
    return "".join(traceback.format_exception(type(error), error, frame or error.__traceback__)).rstrip()
