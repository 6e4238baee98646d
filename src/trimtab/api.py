"""Trimtab from Python: the same runs as the command line, with data and rewards as objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import IO, Any

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.signals import take_signals
from trimtab.config.load import load_as, load_config
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.schema import Config
from trimtab.config.sft import SftConfig
from trimtab.observe.format import scores
from trimtab.observe.observer import Callback
from trimtab.observe.profiling.request import profile_request
from trimtab.observe.result import Result
from trimtab.run import loop
from trimtab.run.build import own_modes, returns_memory
from trimtab.run.evaluation import measure
from trimtab.run.inputs import GIVEN_ROWS, Inputs
from trimtab.run.open_evaluation import open_evaluation
from trimtab.run.restarts import telling_how_it_ends, with_restarts
from trimtab.run.reward_model import run_reward_model
from trimtab.run.session import open_session
from trimtab.run.sft import run_sft

Source = str | PathLike[str]
Section = Mapping[str, Any]
Rows = Source | Iterable[Mapping[str, Any]]
Reward = str | Callable[..., Any] | Section
Tool = str | Callable[..., Any]
Environment = str | type | Sequence[Tool] | Section
OBJECT = "object:"


def train(
    config: Source | Section | None = None,
    *,
    model: Source | Section | None = None,
    data: Rows | Section | None = None,
    eval_data: Rows | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    environment: Environment | None = None,
    learn: Section | None = None,
    run: Section | None = None,
    eval: Section | None = None,
    observe: Section | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    callbacks: Sequence[Callback] | None = None,
    profile_steps: str | int | None = None,
    profile_ranks: str | int | None = None,
    **unknown: Any,
) -> Result:
    """Train, and return the summary (`run_dir`, `eval`, `reward_last`, `seconds`, ...), a dictionary that a notebook shows as
    the verdict with curves and that has the run's metrics, samples, findings and report (observe/result.py).

    Start from a config file or dictionary, from keyword arguments, or both; keywords go over the config. `data` is a file
    name or a task, a list of rows, a data set, or a whole `data` section, in which `train` and `eval` may be rows too;
    `reward` is a function, its path, a `reward` section, or a list of these. `environment` is a class, its path, a list of tools
    (functions or their paths), or an `environment` section with any of these in it. Each of `callbacks` is called after every
    step with its number and its metrics, when these and a checkpoint that is due are written; what it raises ends the run.
    `profile_steps="3:5"` profiles these steps into RUN/profile; with several devices `profile_ranks="0,1"` says which ranks.
    Any other keyword is an unknown key, and is told with the one that was probably meant, as on the command line.
    """
    profile = profile_request(profile_steps, profile_ranks)
    sections = {"model": model, "learn": learn, "run": run, "eval": eval, "observe": observe, **_unknown(unknown)}
    checked, inputs = _gather(config, sections, data, eval_data, reward, overrides, environment)
    inputs.callbacks, inputs.profile = _callable(callbacks), profile
    return Result(run_training(checked, inputs, resume=resume))


def evaluate(
    config: Source | Section | None = None,
    *,
    model: Source | Section | None = None,
    data: Rows | Section | None = None,
    reward: Reward | Sequence[Reward] | None = None,
    environment: Environment | None = None,
    learn: Section | None = None,
    run: Section | None = None,
    eval: Section | None = None,
    overrides: Sequence[str] = (),
    **unknown: Any,
) -> dict[str, float]:
    """Held-out scores (`eval/pass@1`, ...) of a model as it is; nothing is trained and nothing is written.

    Arguments as for `train`, but `data` is what to evaluate on.
    """
    sections = {"model": model, "learn": learn, "run": run, "eval": eval, **_unknown(unknown)}
    if data is not None and not isinstance(data, Mapping):
        data = {"eval": data}
    checked, inputs = _gather(config, sections, data, None, reward, overrides, environment, untrained=True)
    if checked.data.eval is None:
        fix = "Give data=ROWS or data={'eval': ROWS}, or name it in the config."
        raise ConfigError(
            [Problem("data.eval", "there is nothing to evaluate on: evaluate does not read data.train", fix)]
        )
    return run_evaluation(checked, inputs)


def sft(
    config: Source | Section | None = None,
    *,
    model: Source | Section | None = None,
    data: Rows | Section | None = None,
    eval_data: Rows | None = None,
    learn: Section | None = None,
    run: Section | None = None,
    observe: Section | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    callbacks: Sequence[Callback] | None = None,
    profile_steps: str | int | None = None,
    profile_ranks: str | int | None = None,
    **unknown: Any,
) -> Result:
    """Learn from worked answers, and return the summary (`run_dir`, `loss_last`, `eval`, `seconds`, ...).

    Arguments as for `train`; rows are conversations, prompts with completions, or texts.
    """
    profile = profile_request(profile_steps, profile_ranks)
    sections = {"model": model, "learn": learn, "run": run, "observe": observe, **_unknown(unknown)}
    inputs, path, base, tree = _arguments(config, sections, data, eval_data)
    inputs.callbacks, inputs.profile = _callable(callbacks), profile
    return Result(run_sft(load_as(SftConfig, path, overrides, base, tree), inputs, resume=resume))


def reward_model(
    config: Source | Section | None = None,
    *,
    model: Source | Section | None = None,
    data: Rows | Section | None = None,
    eval_data: Rows | None = None,
    learn: Section | None = None,
    run: Section | None = None,
    observe: Section | None = None,
    overrides: Sequence[str] = (),
    resume: bool = False,
    callbacks: Sequence[Callback] | None = None,
    profile_steps: str | int | None = None,
    profile_ranks: str | int | None = None,
    **unknown: Any,
) -> Result:
    """Learn which of two answers is better, and return the summary (`run_dir`, `accuracy`, `eval`, ...).

    Arguments as for `train`; rows are pairs: a prompt, the chosen and the rejected answer.
    """
    profile = profile_request(profile_steps, profile_ranks)
    sections = {"model": model, "learn": learn, "run": run, "observe": observe, **_unknown(unknown)}
    inputs, path, base, tree = _arguments(config, sections, data, eval_data)
    inputs.callbacks, inputs.profile = _callable(callbacks), profile
    return Result(run_reward_model(load_as(RewardModelConfig, path, overrides, base, tree), inputs, resume=resume))


@returns_memory
def run_training(
    config: Config, inputs: Inputs, *, resume: bool = False, console_file: IO[str] | None = None
) -> dict[str, Any]:
    """Run a validated config."""

    def attempt(config: Config, inputs: Inputs, resume: bool) -> dict[str, Any]:
        with ExitStack() as stack:
            session = open_session(config, inputs, stack, resume=resume, console_file=console_file)
            with telling_how_it_ends(session, session.config.learn.steps, inputs):
                return loop.train(session)

    with take_signals(), own_modes():
        return with_restarts(attempt, config, inputs, resume)


@returns_memory
def run_evaluation(config: Config, inputs: Inputs, *, console_file: IO[str] | None = None) -> dict[str, float]:
    """Evaluate a validated config's model."""
    with own_modes(), ExitStack() as stack:
        session = open_evaluation(config, inputs, stack, console_file=console_file)
        session.console.waiting(f"evaluating {len(session.prompts):,} prompts")
        result, _ = measure(session.config, session.prompts, session.generator, session.rewarder, session.tasks)
        session.console.note(f"{config.model.path} | {scores(result)}")
        return result


def _gather(
    config: Source | Section | None,
    sections: Mapping[str, Source | Section | None],
    data: Rows | Section | None,
    eval_data: Rows | None,
    reward: Reward | Sequence[Reward] | None,
    overrides: Sequence[str],
    environment: Environment | None = None,
    untrained: bool = False,
) -> tuple[Config, Inputs]:
    """The arguments as one validated configuration, and what cannot be written in one. `untrained`: data.train is not needed."""
    inputs, path, base, tree = _arguments(config, sections, data, eval_data)
    if untrained:
        base = _with_train(base or {})
    if reward is not None:
        tree["reward"], inputs.rewards = _rewards(reward)
    if environment is not None:
        tree["environment"], inputs.environment = _environment(environment)
    return load_config(path, overrides, base, tree), inputs


def _with_train(base: Section) -> Section:
    """A config without data.train is one whose rows are given, though none will be."""
    data = base.get("data")
    if data is not None and not isinstance(data, Mapping):
        return base  # is reported as what it is
    return {**base, "data": {"train": GIVEN_ROWS, **(data or {})}}


def _arguments(
    config: Source | Section | None,
    sections: Mapping[str, Source | Section | None],
    data: Rows | Section | None,
    eval_data: Rows | None,
) -> tuple[Inputs, Path | None, Section | None, dict[str, Any]]:
    """A file or a dictionary to begin with, sections to lay over it, and the rows that came as objects."""
    inputs = Inputs()
    if not (config is None or isinstance(config, str | PathLike | Mapping)):
        fix = "Give the name of a YAML file, or a dictionary."
        raise ConfigError([Problem("config", f"got a {type(config).__name__}", fix)])
    path, base = (None, config) if isinstance(config, Mapping) else (config, None)
    if path is not None:
        path = Path(path)
        inputs.base_dir, inputs.name = path.absolute().parent, path.stem
    tree: dict[str, Any] = {name: section for name, section in sections.items() if section is not None}
    if isinstance(tree.get("model"), str | PathLike):
        tree["model"] = {"path": tree["model"]}
    if data is not None or eval_data is not None:
        section: dict[str, Any] = dict(data) if isinstance(data, Mapping) else {} if data is None else {"train": data}
        tree["data"] = section | ({} if eval_data is None else {"eval": eval_data})
        inputs.train_rows = _take_rows(tree["data"], "train")
        inputs.eval_rows = _take_rows(tree["data"], "eval")
    return inputs, path, base, tree


def _unknown(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Unknown keyword arguments, as keys at the top of a configuration: the error then names the key that was meant."""
    for name in given:
        if name in (*Config.model_fields, "stage"):  # a section, but none that this function has a use for
            raise ConfigError([Problem(name, "has no effect here", "Leave it out")])
    return {name: "" if value is None else value for name, value in given.items()}  # None is left out of sections


def _callable(callbacks: Sequence[Callback] | None) -> Sequence[Callback]:
    if callbacks is None:
        return ()
    if callable(callbacks) or not isinstance(callbacks, Iterable):
        what = "got one function" if callable(callbacks) else f"got a {type(callbacks).__name__}"
        raise ConfigError([Problem("callbacks", what, "Give a list of functions of (step, metrics).")])
    callbacks = tuple(callbacks)
    for callback in callbacks:
        if not callable(callback):
            what = f"got a {type(callback).__name__}"
            raise ConfigError([Problem("callbacks", what, "Give functions of (step, metrics).")])
    return callbacks


def _take_rows(data: dict[str, Any], key: str) -> list[Mapping[str, Any]] | None:
    """Rows that stand where a name would; the name that takes their place says so in config.yaml."""
    rows = data.get(key)
    if rows is None or isinstance(rows, str | PathLike):
        return None
    data[key] = GIVEN_ROWS
    if not isinstance(rows, Iterable):
        raise ConfigError([Problem(f"data.{key}", f"got a {type(rows).__name__}", "Give a name or a list of rows.")])
    found = list(rows)
    for number, row in enumerate(found):
        if not isinstance(row, Mapping):
            what = f"row {number} is a {type(row).__name__}, not a mapping"
            raise ConfigError([Problem(f"data.{key}", what, "Give rows such as {'prompt': '2+2='}.")])
        odd = next((name for name in row if not isinstance(name, str)), None)
        if odd is not None:
            what = f"row {number} has a column named {odd!r}, of type {type(odd).__name__}"
            raise ConfigError([Problem(f"data.{key}", what, f"Column names must be text: {str(odd)!r}.")])
    return found


def _rewards(reward: Reward | Sequence[Reward]) -> tuple[list[dict[str, Any]], dict[str, Callable[..., Any]]]:
    """Reward parts as the config writes them, and the functions that they name."""
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
            part |= {"fn": f"{OBJECT}{key}", "name": part.get("name") or key}  # a name that was given is not changed
        parts.append(part)
    return parts, functions


def _environment(environment: Environment) -> tuple[dict[str, Any], dict[str, Callable[..., Any]]]:
    """The section as the config writes it, and the class or the functions that it names."""
    if isinstance(environment, Mapping):
        section = dict(environment)
    elif isinstance(environment, Sequence) and not isinstance(environment, str):
        section = {"tools": environment}
    else:
        section = {"fn": environment}
    if "fn" in section and not (section["fn"] is None or isinstance(section["fn"], str) or callable(section["fn"])):
        what = f"got an instance of {type(section['fn']).__name__}, but each completion needs its own"
        raise ConfigError(
            [Problem("environment", what, "Give the class itself, and its arguments as environment.args.")]
        )
    objects: dict[str, Callable[..., Any]] = {}

    def named(entry: Any) -> Any:
        if not callable(entry):
            return entry
        name = str(getattr(entry, "__name__", "environment")).strip("<>")
        key = name if name not in objects else f"{name}_{len(objects)}"
        objects[key] = entry
        return f"{OBJECT}{key}"

    if "fn" in section:
        section["fn"] = named(section["fn"])
    if isinstance(section.get("tools"), Sequence) and not isinstance(section["tools"], str):
        section["tools"] = [named(tool) for tool in section["tools"]]
    return section, objects
