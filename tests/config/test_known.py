"""Sections in which every value is known: the keys that the user writes, without `auto`."""

from typing import Annotated, get_args, get_origin

import pytest
from pydantic import ValidationError

from trimtab.config import known
from trimtab.config.algorithms import resolve
from trimtab.config.base import Section
from trimtab.config.known import ResolvedLearn, ResolvedOffload, ResolvedRollout, ResolvedRun
from trimtab.config.learn import Learn
from trimtab.config.load import config_from_dict, resolved_yaml
from trimtab.config.resolved import ResolvedConfig, resolve_config, with_offline_plan, with_plan
from trimtab.config.run import Rollout, Run
from trimtab.config.schema import Model
from trimtab.config.sft import SftConfig, SftData

LEAST = {"model": {"path": "m"}, "data": {"train": "a.jsonl"}, "reward": [{"fn": "exact_match"}]}
KNOWN = [found for found in vars(known).values() if isinstance(found, type) and found.__module__ == known.__name__]
ROLLOUT = ResolvedRollout(
    max_sequences=8,
    kv_memory=2**20,
    prefill_tokens=64,
    page_tokens=16,
    lend_memory=False,
    processes=1,
    tensor_parallel=1,
)
RUN = ResolvedRun(
    devices=1,
    cluster="local",
    shard="none",
    shard_devices=1, sequence_parallel=1, tensor_parallel=1, prefetch=1, overlap=False, placement="colocated",
    device="cpu", threads=1, engine="native", kernels="plain", token_budget=99, score_token_budget=98, logprob_chunk=7,
    checkpoint_activations="some", reward_workers=2, rollout=ROLLOUT,
    offload=ResolvedOffload(optimizer=True, reference=False, activations=False),
)  # fmt: skip


def _values(annotation: object) -> set[object]:
    """All that stands in a type: the parts of unions, and the words of literals; without bounds."""
    parts = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return {annotation} if not parts else set().union(*map(_values, parts))


@pytest.mark.parametrize("section", KNOWN)
def test_a_known_section_has_the_written_keys_and_no_auto(section: type[Section]) -> None:
    written = section.__bases__[0]
    assert list(section.model_fields) == list(written.model_fields), "the same keys in the same order"
    for name, field in section.model_fields.items():
        allowed = written.model_fields[name].annotation
        assert "auto" not in _values(field.annotation), f"{section.__name__}.{name}"
        if isinstance(allowed, type) and issubclass(allowed, Section):
            assert (field.annotation in KNOWN) == ("auto" in str(allowed.model_fields)), f"{section.__name__}.{name}"
        else:
            assert _values(field.annotation) == _values(allowed) - {"auto"}, f"{section.__name__}.{name}"


def test_nothing_else_can_be_auto() -> None:
    for section, where in ((Learn, ResolvedLearn), (Run, ResolvedRun)):
        narrowed = {name for name, field in section.model_fields.items() if "auto" in str(field)}
        assert narrowed == set(where.__annotations__)
    assert not any("auto" in str(value) for value in (resolve(Learn()).model_dump(), RUN.model_dump()))


def test_auto_is_no_value_of_a_known_section() -> None:
    for key in ("token_budget", "rollout.kv_memory", "offload.optimizer", "checkpoint_activations"):
        with pytest.raises(ValidationError):
            RUN.with_values({key: "auto"})


def test_other_values_are_checked_and_all_else_stays() -> None:
    run = Run(memory=7, rollout=Rollout(page_tokens=32))
    other = run.with_values({"rollout.kv_memory": "2KiB", "token_budget": 5})
    assert other == Run(memory=7, token_budget=5, rollout=Rollout(page_tokens=32, kv_memory=2048))
    assert run == Run(memory=7, rollout=Rollout(page_tokens=32)) and type(RUN.with_values({"memory": 1})) is ResolvedRun
    with pytest.raises(ValidationError):
        run.with_values({"rollout.page_tokens": 0})


def test_a_planned_config_is_written_with_its_plan() -> None:
    config = resolve_config(config_from_dict(LEAST, ["learn.algorithm=dapo"]))
    assert (
        isinstance(config, ResolvedConfig) and config.learn.clip.high == 0.28 and config.learn.dynamic_sampling.enabled
    )
    planned = with_plan(config, RUN)
    assert planned.run is RUN and planned.learn == config.learn
    text = resolved_yaml(planned)
    assert "token_budget: 99" in text and "kv_memory: 1048576" in text and "checkpoint_activations: some" in text


def test_what_an_offline_run_does_not_use_stays_as_written() -> None:
    asked = SftConfig(model=Model(path="m"), data=SftData(train="a.jsonl"), run=Run(rollout=Rollout(page_tokens=32)))
    planned = with_offline_plan(asked, RUN)
    assert type(planned) is SftConfig and planned.run.token_budget == 99 and planned.run.offload.optimizer is True
    assert planned.run.rollout == asked.run.rollout and planned.run.reward_workers == "auto"
