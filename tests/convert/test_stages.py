"""No training becomes another: what is mapped to which command, what is refused with what to do, and near names."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.base.errors import ConfigError
from trimtab.config.load import load_as
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.sft import SftConfig
from trimtab.convert import Conversion, convert


def keys(found: Conversion) -> dict[str, Any]:
    return {key: put.value for key, put in found.sheet.keys.items()}


def refused(kind: str, words: str) -> str:
    with pytest.raises(ConfigError) as error:
        convert(kind, words=words.split())
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "kind", "command"),
    [
        ("trl grpo --beta 0.1", "trl", "trimtab train"),
        ("trl rloo --beta 0.1", "trl-rloo", "trimtab train"),
        ("trl ppo --learning_rate 1e-6", "trl-ppo", "trimtab train"),
        ("trl sft --learning_rate 1e-5", "trl-sft", "trimtab sft"),
        ("trl reward --learning_rate 1e-5", "trl-reward", "trimtab reward-model"),
        ("accelerate launch --num_processes 2 trl/scripts/rloo.py --beta 0.1", "trl-rloo", "trimtab train"),
        ("python -m trl.scripts.sft --learning_rate 1e-5", "trl-sft", "trimtab sft"),
        ("python train.py --beta 0.1", "trl", "trimtab train"),
    ],
)
def test_a_command_of_trl_says_what_is_trained(words: str, kind: str, command: str) -> None:
    found = convert("trl", words=words.split())
    assert (found.framework.kind, found.framework.command) == (kind, command)
    assert found.as_dict()["kind"] == kind and found.as_dict()["command"] == command


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("c = GRPOConfig(beta=0.1)", "trl"),
        ("c = RLOOConfig(beta=0.1)", "trl-rloo"),
        ("t = trl.RLOOTrainer(model='m')", "trl-rloo"),
        ("c = PPOConfig(learning_rate=1e-6)", "trl-ppo"),
        ("c = SFTConfig(max_length=512)", "trl-sft"),
        ("c = RewardConfig(max_length=512)", "trl-reward"),
        ("normalize_advantages: true\nbeta: 0.1\n", "trl-rloo"),
        ("packing: true\nlearning_rate: 1e-5\n", "trl-sft"),
        ("center_rewards_coefficient: 0.01\n", "trl-reward"),
        ("lam: 0.9\n", "trl-ppo"),
        ("lam: 0.9\nnum_generations: 4\n", "trl"),
    ],
)
def test_so_does_a_class_or_an_argument_that_one_class_alone_has(text: str, kind: str) -> None:
    assert convert("trl", text=text).framework.kind == kind


def test_rloo_is_rloo_with_trls_penalty_and_bounds() -> None:
    found = keys(convert("trl", words=["trl", "rloo", "--num_generations", "4", "--epsilon_high", "0.3"]))
    assert {
        "learn.algorithm": "rloo",
        "learn.samples_per_prompt": 4,
        "learn.kl.coef": 0.05,
        "learn.kl.where": "reward",
        "learn.kl.estimator": "k1",
        "learn.clip.high": 0.3,
    }.items() <= found.items()
    assert "learn.aggregate" not in found and "learn.loss" not in found  # the recipe's, which are TRL's
    grpos = convert("trl", words=["trl", "rloo", "--loss_type", "dapo", "--use_vllm"])
    assert grpos.lines[0].outcome == "dead" and not any(key.startswith("learn.importance") for key in keys(grpos))
    assert (
        keys(convert("trl", words=["trl", "rloo", "--rloo_k", "4", "--kl_coef", "0"]))["learn.samples_per_prompt"] == 4
    )


def test_supervised_training_gives_a_config_of_trimtab_sft(tmp_path: Any) -> None:
    words = "accelerate launch --num_processes 4 -m trl.scripts.sft --model_name_or_path m --dataset_name a/b"
    found = convert("trl", words=[*words.split(), "--gradient_accumulation_steps", "2", "--assistant_only_loss"])
    assert found.sheet.tree() == {
        "stage": "sft",
        "model": {"path": "m"},
        "data": {"train": "a/b", "chat_template": "auto"},
        "learn": {
            "epochs": 3,
            "sequences_per_step": 64,
            "lr": 2e-5,
            "schedule": {"kind": "linear", "final": 0.0},
            "loss_on": "assistant",
            "max_tokens": 1024,
        },
    }  # 64 = 8 × 2 × 4 processes
    file = tmp_path / "sft.yaml"
    file.write_text(found.yaml)
    assert load_as(SftConfig, file).learn.sequences_per_step == 64


def test_what_supervised_training_learns_is_asked_for_where_the_columns_decide() -> None:
    bare = convert("trl", words=["trl", "sft", "--dataset_name", "a/b"])
    assert "learn.loss_on" in [item.key for item in bare.sheet.missing] and keys(bare)["data.chat_template"] == "never"
    packed = convert(
        "trl", words=["trl", "sft", "--packing", "--max_length", "2048", "--per_device_train_batch_size", "4"]
    )
    (size,) = [item for item in packed.sheet.missing if item.key == "learn.sequences_per_step"]
    assert "8192 tokens" in size.what and "learn.sequences_per_step" not in keys(packed)
    assert "dft is not supported" in refused("trl", "trl sft --loss_type dft")


def test_a_reward_model_gives_a_config_of_trimtab_reward_model(tmp_path: Any) -> None:
    words = "trl reward --model_name_or_path m --dataset_name a/b --center_rewards_coefficient 0.01 --max_steps 50"
    found = convert("trl", words=words.split())
    file = tmp_path / "pairs.yaml"
    file.write_text(found.yaml)
    config = load_as(RewardModelConfig, file)
    assert (config.learn.center, config.learn.lr, config.learn.pairs_per_step) == (0.01, 1e-4, 8)
    assert config.learn.steps == 50 and not config.learn.normalize and config.learn.max_tokens == 1024
    assert config.learn.schedule.kind == "linear" and config.learn.schedule.final == 0


@pytest.mark.parametrize(
    ("kind", "words", "messages"),
    [
        ("trl", "trl dpo --beta 0.1", ["trl dpo: ", "not supported", "trimtab reward-model", "model:RUN/final"]),
        ("trl", "trl kto --beta 0.1", ["trl kto: ", "reward function", "trimtab reward-model"]),
        ("trl", "trl distillation --beta 0.1", ["trimtab sft"]),
        ("trl", "python examples/scripts/dpo.py --beta 0.1", ["dpo.py: ", "trimtab reward-model"]),
        ("trl", "trl gropo --beta 0.1", ["trl gropo: is not a TRL command", "Did you mean trl grpo?"]),
        ("trl", "trl zzz --beta 0.1", ["Write trl grpo, rloo, ppo, sft or reward"]),
        ("trl-sft", "trl grpo --beta 0.1", ["is not what trl-sft converts", "trimtab convert trl"]),
        ("openrlhf", "deepspeed --module openrlhf.cli.train_sft --max_len 2048", ["not converted", "trimtab sft"]),
        ("openrlhf", "deepspeed --module openrlhf.cli.train_rm --max_len 2048", ["trimtab reward-model"]),
        ("openrlhf", "deepspeed --module openrlhf.cli.train_dpo --beta 0.1", ["not supported", "trimtab reward-model"]),
        ("verl", "torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=a", ["not converted", "trimtab sft"]),
        ("nanochat", "torchrun -m scripts.chat_sft --num-epochs=1", ["not converted", "trimtab sft"]),
    ],
)
def test_other_trainings_are_refused_with_what_to_do(kind: str, words: str, messages: list[str]) -> None:
    text = refused(kind, words)
    assert all(message in text for message in messages), text


@pytest.mark.parametrize(
    "name", ["DPOConfig", "DPOTrainer", "KTOConfig", "ORPOConfig", "OnlineDPOConfig", "GKDTrainer", "PRMConfig"]
)
def test_so_are_their_classes(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        convert("trl", text=f"from trl import {name}\nc = {name}(beta=0.1)\n")


def test_two_trainings_in_one_text_are_not_mixed() -> None:
    with pytest.raises(ConfigError, match="SFTConfig, GRPOConfig: the settings of 2 training runs are mixed"):
        convert("trl", text="a = SFTConfig(max_length=1)\nb = GRPOConfig(beta=0.1)\n")


@pytest.mark.parametrize("name", ["remax", "opo", "gpg", "grpo_passk", "gdpo", "optimal_token_baseline"])
def test_verls_estimators_that_are_not_here(name: str) -> None:
    text = refused("verl", f"algorithm.adv_estimator={name}")
    assert f"{name} is not supported" in text and "Add algorithm.adv_estimator=" in text
    words = f"algorithm.adv_estimator={name} algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=4"
    found = convert("verl", words=words.split())  # the advice works: the last one counts
    assert keys(found)["learn.algorithm"] == "rloo" and found.lines[0].outcome == "dead"


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("verl", "algorithm.adv_estimator=grppo", "Did you mean grpo?"),
        ("verl", "algorithm.adv_estimator=reinforce_plus_plus_base", "Did you mean reinforce_plus_plus_baseline?"),
        ("verl", "algorithm.adv_estimator=zzzzzz", "Write one of gae, grpo"),
        ("verl", "actor_rollout_ref.actor.policy_loss.loss_mode=gsppo", "Did you mean gspo?"),
        ("verl", "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", "clip_cov is not supported"),
        ("verl", "actor_rollout_ref.actor.loss_agg_mode=token-meen", "Did you mean token-mean?"),
        ("openrlhf", "--advantage_estimator group_nrom", "Did you mean group_norm?"),
        ("openrlhf", "--advantage_estimator grpo", "Write one of gae, reinforce"),
        ("openrlhf", "--policy_loss_type ppoo", "Did you mean ppo?"),
        ("trl", "--loss_type dapoo", "Did you mean dapo?"),
        ("trl", "--loss_type sapo", "sapo is not supported"),
        ("trl", "--importance_sampling_level sequnce", "Did you mean sequence?"),
        (
            "trl",
            "--loss_type cispo --importance_sampling_level sequence",
            "Trimtab has no CISPO with one ratio for a sequence",
        ),
    ],
)
def test_a_name_of_an_algorithm_that_is_not_known_is_an_error_with_a_near_one(
    kind: str, words: str, message: str
) -> None:
    text = refused(kind, words)
    assert message in text, text
    assert "nearest" not in text


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("trl", "--scale_rewards grup", "(is group meant?)"),
        ("trl", "--scale_rewards zzz", "Takes one of group"),
        ("trl", "--lr_scheduler_type liner", "did you mean linear?"),
        ("trl", "--lr_scheduler_type polynomial", "Trimtab does not have polynomial: write learn.schedule.kind"),
        (
            "verl",
            "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=abs",
            "Takes one of kl, k1",
        ),
    ],
)
def test_other_values_that_are_not_known_are_said_to_be_so_and_left_out(kind: str, words: str, message: str) -> None:
    line = convert(kind, words=words.split()).lines[-1]
    assert line.outcome == "unsupported" and message in line.as_dict()["note"], line.as_dict()


def test_a_loss_that_the_loader_refuses_is_not_left_out_for_another() -> None:
    text = refused("verl", "actor_rollout_ref.actor.policy_loss.loss_mode=gpg")
    assert "on_policy has no importance ratio" in text and "another algorithm" in text
