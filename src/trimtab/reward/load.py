"""From what the configuration names to a function that can be called.

Guarantees: every mistake that can be seen without data is a RewardError before the run starts, with what to write
instead: an unknown built-in, a missing file, module or function, a syntax error, an argument that is not taken.
`locate` runs in the trainer and imports none of the user's code; `load` runs in a worker. Names in general: workers/user_code.py.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.base.errors import RewardError
from trimtab.base.suggestions import near_or_all
from trimtab.workers.user_code import REWARD, UserCode, import_object, locate_object

CALL_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments that every call offers, besides the row's columns."""
ENVIRONMENT_ARGUMENTS = ("turns", "environment_reward")
"""Those that calls offer besides where there is an environment."""
IMMUTABLE_TYPES = (str, int, float, bytes, type(None))
"""Types whose values cannot be changed."""
ENVIRONMENT = "environment"
"""Names what the environment itself gave."""


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
        return self.call(
            **{key: value if key in self.args else separate_copies(value) for key, value in arguments.items()}
        )


def separate_copies(values: list[Any]) -> list[Any]:
    """Each sample's own copy of what the samples of a prompt have in common: a function that pops a test, or adds to messages,
    would otherwise do so for the samples after it."""
    if len(values) < 2 or isinstance(values[0], IMMUTABLE_TYPES) or any(value is not values[0] for value in values):
        return values
    copy = pickle.dumps(values[0])
    return [values[0], *(pickle.loads(copy) for _ in values[1:])]


def locate(fn: str, base_dir: Path, functions: Mapping[str, Callable[..., Any]]) -> UserCode:
    """Find what `fn` names: a built-in, `object:NAME`, `model:PATH`, `file.py:function` or `package.module:function`."""
    if fn == ENVIRONMENT:
        return UserCode("environment", "", ENVIRONMENT)
    if fn.startswith("model:"):
        path = fn.removeprefix("model:")
        if not path:
            raise RewardError("reward.fn: 'model:' names no model. Write model:FOLDER, such as model:runs/rm/final")
        local = Path(path).expanduser()
        local = local if local.is_absolute() else base_dir / local
        place = str(local) if local.is_dir() else path
        return UserCode("model", place, "reward_model")
    from trimtab.reward.builtins import BUILTINS

    return locate_object(fn, base_dir, functions, BUILTINS, REWARD)


def load(source: UserCode, args: dict[str, Any]) -> Function:
    """Import the function and check its signature against `args`. Runs the user's module code."""
    if source.kind == "builtin":
        from trimtab.reward.builtins import BUILTINS

        function = describe(BUILTINS[source.name], args, source)
        function({name: [] for name in CALL_ARGUMENTS})  # finds bad values of args and missing packages
        if source.name == "judge":
            from trimtab.reward.judge.reward import columns_needed

            function = replace(function, needs=columns_needed(function.args))
        return function
    found = import_object(source, REWARD)
    if inspect.isclass(found):  # calling it would give an instance, not rewards
        name = source.name.rpartition(".")[2]
        raise RewardError(
            f"reward {source} is a class, not a function. Make an instance in its file, such as {name.lower()} = {name}(), "
            "and name that"
        )
    return describe(found, args, source)


def describe(call: Callable[..., Any], args: dict[str, Any], source: UserCode) -> Function:
    """What a function takes, from its signature; an entry of `args` that it does not take is an error."""
    try:
        parameters = inspect.signature(call).parameters.values()
    except ValueError:  # some functions written in C have no signature
        return Function(call, args, None, frozenset())
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if positional:
        raise RewardError(
            f"reward {source}: {', '.join(positional)} cannot be passed by name. Remove the / from the function's arguments"
        )
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in args:
        # What a built-in does not name are columns, so an unnamed argument is a misspelt one.
        if key not in named and (not takes_any or source.kind == "builtin"):
            known = [name for name in named if name not in CALL_ARGUMENTS]
            raise RewardError(f"reward.args: {source} takes no argument {key!r}. {near_or_all(key, known)}")
    missing = {
        name for name, p in named.items() if p.default is p.empty and name not in args and name not in CALL_ARGUMENTS
    }
    if source.kind == "builtin":
        if missing:
            raise RewardError(f"reward.args: {source} needs a value for {', '.join(sorted(missing))}")
        # Options come from `args` alone: a column of the data may have an option's name by chance.
        args = {name: p.default for name, p in named.items() if p.kind is p.KEYWORD_ONLY} | args
        missing = {args["column"]} if "column" in args else set()
    return Function(call, args, None if takes_any else frozenset(named), frozenset(missing))
