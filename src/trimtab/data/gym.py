"""Rows from reasoning_gym, and their scores by its own verifiers.

- Train and eval never share a question: the eval questions are generated first, and train leaves them out.
- A row carries all that its score needs (`rg_metadata`), so scoring regenerates nothing. It must not: some tasks are
  not reproducible from one process to the next (see UNREPEATABLE), and others take a second a problem.

reasoning_gym draws item i of seed s from the random stream s + i, so neighbouring seeds share all but one item. Seeds
are spread apart here for that reason.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from trimtab.base.errors import DataError
from trimtab.base.suggestions import did_you_mean
from trimtab.data.files import Row
from trimtab.data.options import Split, check_options, split_size, whole_number

TRAIN_SIZE, EVAL_SIZE = 1024, 128
"""Rows generated when `size` and `eval_size` are not set; some tasks take a second a row."""

UNREPEATABLE = frozenset({"codeio", "isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note"})
"""Tasks whose problems depend on Python's hash seed (reasoning_gym 0.1.25): to repeat a run, set PYTHONHASHSEED."""

_SEED_STRIDE = 1_000_003
_SEED_RANGE = 2**30  # some tasks seed numpy, which takes 32 bits
_EVAL_SEED = 2**31

_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)

log = logging.getLogger(__name__)


def load_reasoning_gym(
    name: str, *, split: Split, limit: int | None, options: Mapping[str, Any], seed: int
) -> list[Row]:
    """Rows of `reasoning_gym:NAME`: prompt, answer, rg_index, rg_task, rg_options, rg_metadata.

    Options: size (training rows), eval_size, seed, difficulty (1, 2, ...: the level of the task's curriculum), and
    the fields of the task's own configuration.
    """
    source = f"reasoning_gym:{name}"
    settings = _settings(name, options)
    size = split_size(source, "train", options, TRAIN_SIZE, EVAL_SIZE)
    eval_size = split_size(source, "eval", options, TRAIN_SIZE, EVAL_SIZE)
    seed = whole_number(source, "seed", options.get("seed", seed), at_least=0) * _SEED_STRIDE % _SEED_RANGE
    if name in UNREPEATABLE:
        log.warning("%s gives different problems in every process. Set PYTHONHASHSEED to make them the same.", source)

    held_out = _draw(name, {**settings, "size": eval_size, "seed": _EVAL_SEED + seed}, eval_size, frozenset())
    if split == "eval":
        return held_out[:limit]
    wanted = size if limit is None else min(size, limit)
    questions = frozenset(row["prompt"] for row in held_out)
    rows = _draw(name, {**settings, "size": size + eval_size, "seed": seed}, wanted, questions)
    if not rows:
        raise DataError(
            f"{source}: every training question is also an evaluation question. Lower data.options.eval_size."
        )
    if len(rows) < wanted:
        log.warning(
            "%s has %d training rows instead of %d: the others are evaluation questions.", source, len(rows), wanted
        )
    return rows


def score_reasoning_gym(completion: str, row: Mapping[str, Any]) -> float:
    """The task's own score (0..1) of what stands in the last <answer> tag, or of the whole completion if there is none.

    Some verifiers raise an error on text that they cannot parse; such an answer is wrong, so it scores 0. One that raises on the
    right answer, too, is out of order: that is an error.
    """
    tagged = _ANSWER_TAG.findall(completion)
    answer = (tagged[-1] if tagged else completion).strip()
    entry = {"question": row.get("prompt"), "answer": row["answer"], "metadata": row["rg_metadata"]}
    dataset = _dataset(row["rg_task"], json.dumps(row["rg_options"], sort_keys=True))
    try:
        return float(dataset.score_answer(answer=answer, entry=entry))
    except Exception:
        dataset.score_answer(answer=row["answer"], entry=entry)
        return 0.0


def _draw(name: str, settings: dict[str, Any], count: int, leave_out: frozenset[str]) -> list[Row]:
    dataset = _dataset(name, json.dumps(settings, sort_keys=True))
    rows: list[Row] = []
    for index in range(settings["size"]):
        if len(rows) == count:
            break
        entry = dataset[index]
        if entry["question"] not in leave_out:
            rows.append(
                {
                    "prompt": entry["question"],
                    "answer": entry["answer"],
                    "rg_index": index,
                    "rg_task": name,
                    "rg_options": settings,
                    "rg_metadata": entry["metadata"],
                }
            )
    return rows


@lru_cache(maxsize=64)
def _dataset(name: str, settings_json: str) -> Any:
    gym = _library()
    settings = json.loads(settings_json)
    if name == "composite":
        from reasoning_gym.composite import DatasetSpec

        settings["datasets"] = [DatasetSpec(**spec) for spec in settings.get("datasets", [])]
    try:
        return gym.create_dataset(name, **settings)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"reasoning_gym:{name} does not accept these options: {error} ({settings_json})") from error


def _settings(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The task's configuration fields that the options set, the difficulty's first."""
    known = _library().factory.DATASETS
    if name not in known:
        raise DataError(
            f"reasoning_gym has no task {name!r}.{did_you_mean(name, known)} "
            f"It has {len(known)}: {', '.join(sorted(known))}."
        )
    fields = [f.name for f in dataclasses.fields(known[name][1]) if f.name not in ("size", "seed")]
    check_options(
        f"reasoning_gym:{name}", options, list(dict.fromkeys(["difficulty", "size", "eval_size", "seed", *fields]))
    )
    settings = {key: value for key, value in options.items() if key in fields}
    if "difficulty" in options and "difficulty" not in fields:
        settings = {**_curriculum(name, options["difficulty"]), **settings}
    return settings


def _curriculum(name: str, difficulty: Any) -> dict[str, Any]:
    """The configuration of one level of the task's curriculum; attributes with fewer levels stay at their last."""
    factory = _library().factory
    source = f"reasoning_gym:{name}"
    if not factory.has_curriculum(name):
        raise DataError(f"{source} has no curriculum, so it takes no difficulty. Set the task's own options.")
    level = whole_number(source, "difficulty", difficulty, at_least=1) - 1
    curriculum = factory.create_curriculum(name)
    attributes = curriculum.attributes.values()
    levels = max(len(attribute.levels) for attribute in attributes)
    if level >= levels:
        raise DataError(f"{source}: option difficulty must be from 1 to {levels}, not {difficulty}.")
    for attribute in attributes:
        curriculum.set_attr_level(attribute.name, min(level, len(attribute.levels) - 1))
    config = curriculum.generate_configuration()
    names = ("field_name", "lower_field_name", "upper_field_name")
    fields = [getattr(attribute, key) for attribute in attributes for key in names if hasattr(attribute, key)]
    return {field: getattr(config, field) for field in fields}


def _library() -> Any:
    try:
        import reasoning_gym
    except ImportError as error:
        raise DataError("reasoning_gym tasks need reasoning-gym: pip install 'trimtab[tasks]'.") from error
    return reasoning_gym
