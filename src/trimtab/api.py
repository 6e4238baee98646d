"""Trimtab from Python: the same runs as the command line, with data and rewards as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from trimtab import loop
from trimtab.config.load import config_from_dict, load_config
from trimtab.config.schema import Config
from trimtab.errors import ConfigError, Problem
from trimtab.session import Inputs, open_session

Reward = str | Callable[..., Any] | Mapping[str, Any]
Rows = str | Iterable[Mapping[str, Any]]
OBJECT = "object:"
GIVEN_ROWS = "object:rows"


def train(
    config: str | Path | Mapping[str, Any] | None = None,
    *,
    model: str | Mapping[str, Any] | None = None,
    data: Rows | Mapping[str, Any] | None = None,
    eval_data: Rows | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    learn: Mapping[str, Any] | None = None,
    run: Mapping[str, Any] | None = None,
    eval: Mapping[str, Any] | None = None,
    observe: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
) -> dict[str, Any]:
    """Train, and return the summary (`run_dir`, `eval`, `reward_last`, `seconds`, ...).

    Start from a config file or dictionary, from keyword arguments, or both; keywords go over the config. `data` is a file
    name or a task, a list of rows, a data set, or a whole `data` section; `reward` a function, its path, or a list.
    """
    tree, inputs = _tree(config, model, data, eval_data, reward, learn, run, eval, observe)
    return run_training(config_from_dict(tree, overrides), inputs, resume=resume)


def run_training(
    config: Config, inputs: Inputs, *, resume: bool = False, console_file: IO[str] | None = None
) -> dict[str, Any]:
    """Run a validated config."""
    with ExitStack() as stack:
        return loop.train(open_session(config, inputs, stack, resume=resume, console_file=console_file))


def evaluate(config: Config, inputs: Inputs, *, console_file: IO[str] | None = None) -> dict[str, float]:
    """Held-out scores of `config.model` as it is; nothing is trained."""
    with ExitStack() as stack:
        session = open_session(config, inputs, stack, console_file=console_file)
        return loop.evaluate(session)


def _tree(
    config: str | Path | Mapping[str, Any] | None,
    model: str | Mapping[str, Any] | None,
    data: Rows | Mapping[str, Any] | None,
    eval_data: Rows | None,
    reward: Reward | Sequence[Reward] | None,
    learn: Mapping[str, Any] | None,
    run: Mapping[str, Any] | None,
    eval: Mapping[str, Any] | None,
    observe: Mapping[str, Any] | None,
) -> tuple[dict[str, Any], Inputs]:
    """The arguments as one configuration tree, and what cannot be written in one."""
    inputs = Inputs()
    tree: dict[str, Any] = {}
    if isinstance(config, str | Path):
        tree = load_config(config).model_dump(exclude_unset=True)
        inputs.base_dir, inputs.name = Path(config).absolute().parent, Path(config).stem
    elif config is not None:
        tree = {key: dict(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    if model is not None:
        tree["model"] = {**tree.get("model", {}), **({"path": model} if isinstance(model, str) else model)}
    if isinstance(data, str):
        tree["data"] = {**tree.get("data", {}), "train": data}
    elif isinstance(data, Mapping):
        tree["data"] = {**tree.get("data", {}), **data}
    elif data is not None:
        inputs.train_rows = _rows(data, "data")
        tree["data"] = {**tree.get("data", {}), "train": GIVEN_ROWS}
    if isinstance(eval_data, str):
        tree.setdefault("data", {})["eval"] = eval_data
    elif eval_data is not None:
        inputs.eval_rows = _rows(eval_data, "eval_data")
        tree.setdefault("data", {})["eval"] = GIVEN_ROWS
    if reward is not None:
        tree["reward"], inputs.rewards = _rewards(reward)
    for name, section in (("learn", learn), ("run", run), ("eval", eval), ("observe", observe)):
        if section is not None:
            tree[name] = {**tree.get(name, {}), **section}
    return tree, inputs


def _rows(rows: Iterable[Any], name: str) -> list[Mapping[str, Any]]:
    found = list(rows)
    for number, row in enumerate(found):
        if not isinstance(row, Mapping):
            raise ConfigError(
                [
                    Problem(
                        name,
                        f"row {number} is a {type(row).__name__}, not a mapping",
                        "Give rows such as {'prompt': '2+2='}.",
                    )
                ]
            )
    return found


def _rewards(reward: Reward | Sequence[Reward]) -> tuple[list[dict[str, Any]], dict[str, Callable[..., Any]]]:
    listed = list(reward) if isinstance(reward, Sequence) and not isinstance(reward, str) else [reward]
    parts: list[dict[str, Any]] = []
    functions: dict[str, Callable[..., Any]] = {}
    for index, entry in enumerate(listed):
        part: dict[str, Any] = dict(entry) if isinstance(entry, Mapping) else {"fn": entry}
        if callable(part.get("fn")):
            function = part["fn"]
            name = str(part.get("name") or getattr(function, "__name__", "reward")).strip("<>")
            key = name if name not in functions else f"{name}_{index}"
            functions[key] = function
            part |= {"fn": f"{OBJECT}{key}", "name": key}
        parts.append(part)
    return parts, functions
