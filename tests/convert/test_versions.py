"""Defaults are those of the version that is asked for. The values are those of the releases' own files."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.base.errors import ConfigError
from trimtab.convert import FRAMEWORKS, Conversion, convert
from trimtab.convert.versions import ABSENT, OldDefault, defaults_of


def keys(found: Conversion) -> dict[str, Any]:
    return {key: put.value for key, put in found.sheet.keys.items()}


def trl(version: str | None, words: str = "--model_name_or_path m") -> dict[str, Any]:
    return keys(convert("trl", words=words.split(), version=version))


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (None, {"learn.max_new_tokens": None, "learn.aggregate": "token_mean", "learn.kl.coef": None}),
        ("1.10.0", {"learn.max_new_tokens": None}),
        ("1.9.0", {"learn.max_new_tokens": 256, "learn.aggregate": "token_mean", "data.max_prompt_tokens": None}),
        ("0.24", {"learn.max_new_tokens": 256, "data.max_prompt_tokens": 512, "learn.kl.coef": None}),
        ("0.21.0", {"learn.aggregate": "token_mean", "learn.kl.coef": None}),
        ("0.18.2", {"learn.kl.coef": 0.04, "learn.sampling.temperature": None, "learn.kl.corrected": None}),
        ("0.17", {"learn.kl.coef": 0.04, "learn.sampling.temperature": 0.9, "learn.sampling.top_k": 50}),
        ("v0.15.2", {"learn.aggregate": "sequence_mean", "learn.kl.coef": 0.04}),
    ],
)
def test_trl(version: str | None, expected: dict[str, Any]) -> None:
    """None: the default of that version is Trimtab's own, and the key is left out."""
    found = trl(version)
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("version", "corrected"), [(None, True), ("1.10", True), ("1.9", None), ("0.26", None), ("0.24", None)]
)
def test_trl_corrects_its_kl_since_1_10(version: str | None, corrected: bool | None) -> None:
    assert trl(version, "--beta 0.1").get("learn.kl.corrected") is corrected
    asked = trl(
        version, "--beta 0.1 --use_bias_correction_kl True --importance_sampling_level sequence --loss_type grpo"
    )
    assert asked["learn.kl.corrected"] == "sequence"


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        (None, ("sequence", "mask", 3.0)),
        ("0.26.0", ("sequence", "mask", 3.0)),
        ("0.25.1", ("token", "truncate", 2.0)),
        ("0.23", ("token", "truncate", 2.0)),
        ("0.22", ("off", "truncate", 2.0)),
    ],
)
def test_trl_corrects_for_vllm(version: str | None, expected: tuple[str, str, float]) -> None:
    found = trl(version, "--use_vllm")
    usual = {"level": "off", "mode": "truncate", "cap": 2.0}
    assert tuple(found.get(f"learn.importance.{key}", value) for key, value in usual.items()) == expected
    assert not any(key.startswith("learn.importance") for key in trl(version))


def test_the_other_classes_of_trl() -> None:
    assert keys(convert("trl-rloo", words=["--seed=1"], version="1.9"))["learn.max_new_tokens"] == 256
    assert keys(convert("trl-rloo", words=["--seed=1"], version="0.26"))["data.max_prompt_tokens"] == 512
    assert keys(convert("trl-reward", words=["--seed=1"], version="0.23"))["learn.lr"] == 5e-5
    assert keys(convert("trl-reward", words=["--seed=1"]))["learn.lr"] == 1e-4


def test_verl() -> None:
    words = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.clip_ratio=0.1"]
    old, new = (convert("verl", words=words, version=version) for version in ("0.3", "0.4.0"))
    assert {"learn.entropy_coef": 0.001, "learn.kl.where": "reward", "learn.clip.low": 0.1}.items() <= keys(old).items()
    assert "learn.clip.dual" not in keys(old) and old.lines[-1].outcome == "mapped"
    assert keys(new)["learn.clip.dual"] == 3.0 and new.lines[-1].outcome == "dead"
    assert "learn.entropy_coef" not in keys(new) and "learn.kl.coef" not in keys(new)
    loss = keys(convert("verl", words=["actor_rollout_ref.actor.use_kl_loss=True"], version="0.3"))
    assert loss["learn.kl.where"] == "loss"
    cap = convert("verl", words=["actor_rollout_ref.actor.tis_imp_ratio_cap=4"], version="0.5")
    assert keys(cap)["learn.importance.level"] == "token" and keys(cap)["learn.importance.cap"] == 4.0


def test_openrlhf() -> None:
    old = keys(convert("openrlhf", words=["--pretrain=m"], version="0.8.1"))
    assert "learn.critic.clip" not in old  # 0.2 then, which is Trimtab's own
    assert (old["learn.max_new_tokens"], old["data.max_prompt_tokens"]) == (1024, 1024)
    new = keys(convert("openrlhf", words=["--pretrain=m"]))
    assert new["learn.critic.clip"] == 0.5 and new["learn.reward_clip"] == [-10.0, 10.0]
    words = ["--enable_vllm_is_correction", "--vllm_is_truncated_threshold", "3"]
    assert keys(convert("openrlhf", words=words, version="0.9.0"))["learn.importance.cap"] == 3.0
    assert keys(convert("openrlhf", words=words[:1], version="0.9.0"))["learn.importance.cap"] == 2.0
    assert keys(convert("openrlhf", words=words[:1]))["learn.importance.cap"] == 5.0


@pytest.mark.parametrize(
    ("kind", "version", "message"),
    [
        ("trl", "0.14", "from 0.15.0 to 1.16.0, but not of 0.14"),
        ("trl", "1.17", "from 0.15.0 to 1.16.0"),
        ("trl-rloo", "0.21", "Trimtab knows the defaults of trl-rloo from 0.22.0"),
        ("verl", "newest", "'newest' is not a version"),
        ("nanochat", "1.0", "the settings of nanochat have no versions"),
    ],
)
def test_versions_that_are_not_known_are_refused(kind: str, version: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        convert(kind, words=["seed=1"], version=version)
    assert message in str(error.value)


def test_a_conversion_says_whose_defaults_it_took() -> None:
    found = convert("trl", words=["--beta=0.1"], version="0.24")
    assert "TRL 0.24, GRPOConfig" in found.yaml.splitlines()[0] and found.as_dict()["version"] == "0.24"
    assert f"TRL {FRAMEWORKS['trl'].newest}, GRPOConfig" in convert("trl", words=["--beta=0.1"]).yaml.splitlines()[0]
    assert convert("script", text="SEED = 1").as_dict()["version"] is None


def test_of_several_changes_of_one_default_the_next_one_counts() -> None:
    was = (OldDefault("0.5", "a", 1), OldDefault("0.3", "a", 2), OldDefault("0.4", "b", ABSENT))
    today = {"a": 0, "b": 5}
    assert [defaults_of(version, today, was) for version in ("0.5", "0.4.9", "0.3.0", "0.2")] == [
        {"a": 0, "b": 5}, {"a": 1, "b": 5}, {"a": 1}, {"a": 2}
    ]  # fmt: skip
