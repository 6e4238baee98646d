"""The tables themselves: every name once, every key in the schema, every default a flag; and no torch."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from trimtab.base.errors import ConfigError
from trimtab.config.reference import slot, use_schema
from trimtab.convert import FRAMEWORKS, convert
from trimtab.convert.sheet import Framework


@pytest.fixture(params=list(FRAMEWORKS))
def framework(request: pytest.FixtureRequest) -> Framework:
    return FRAMEWORKS[request.param]


def test_no_name_has_two_rules(framework: Framework) -> None:
    names = Counter(framework.spelling(name) for rule in framework.rules for name in rule.names)
    assert [name for name, times in names.items() if times > 1] == []


def test_names_are_spelt_as_they_are_looked_up(framework: Framework) -> None:
    assert [rule.name for rule in framework.rules if framework.spelling(rule.name) != rule.name] == []


def test_every_key_is_in_the_schema(framework: Framework) -> None:
    with use_schema(framework.schema):
        wrong = [rule.key for rule in framework.rules if rule.key and slot(rule.key.split(".")) is None]
    assert wrong == []


def test_whatever_goes_nowhere_says_why(framework: Framework) -> None:
    assert [rule.name for rule in framework.rules if rule.outcome != "mapped" and not rule.note] == []
    assert [rule.name for rule in framework.rules if rule.outcome == "mapped" and not rule.key] == []


def test_only_run_keys_and_few_others_pin_what_is_automatic(framework: Framework) -> None:
    sections = {rule.key.split(".")[0] for rule in framework.rules if rule.outcome == "automatic" and rule.key}
    assert sections <= {"run", "observe", "model", "data", "eval", "learn"}


def test_defaults_are_flags_of_the_table(framework: Framework) -> None:
    names = {rule.name for rule in framework.rules}
    assert set(framework.defaults) <= names and {was.name for was in framework.was} <= names


NAMES_OF_ALGORITHMS = {
    "openrlhf": {"algo.advantage.estimator", "actor.policy_loss_type"},
    "verl": {"algorithm.adv_estimator", "A.actor.policy_loss.loss_mode", "A.actor.loss_agg_mode"},
    "trl": {"loss_type", "importance_sampling_level"},
    "trl-sft": {"loss_type"},
}
"""Flags for which a name that is not known refuses the whole conversion."""


def test_every_flag_alone_is_converted_to_a_config_that_loads(framework: Framework) -> None:
    refused = set()
    for rule in framework.rules:
        for value in ("1", "0.5", "true", "some-text", "null", "-1"):
            flag = f"{framework.in_full(rule.name).replace('*', 'x')}={value}"
            try:
                found = convert(framework.kind, words=[flag])
            except ConfigError:
                refused.add(rule.name)
                continue
            assert len(found.lines) == 1, rule.name
            assert found.lines[0].outcome != "mapped" or found.lines[0].key, rule.name
    assert refused == NAMES_OF_ALGORITHMS.get(framework.kind, set())


def test_conversion_needs_no_torch() -> None:
    code = "import sys, trimtab.convert as c; c.convert('verl', words=['a=1']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
