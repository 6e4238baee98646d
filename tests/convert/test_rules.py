"""Each rule that computes something, against numbers worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from trimtab.convert import Conversion, convert


def keys(found: Conversion) -> dict[str, Any]:
    return {key: put.value for key, put in found.sheet.keys.items()}


def row(found: Conversion, flag: str) -> dict[str, Any]:
    return next(line.as_dict() for line in found.lines if line.setting.name == flag)


def openrlhf(*words: str) -> Conversion:
    return convert("openrlhf", words=words)


def verl(*words: str) -> Conversion:
    return convert("verl", words=[word.replace("A.", "actor_rollout_ref.") for word in words])


def trl(*words: str) -> Conversion:
    return convert("trl", words=words)


# --- OpenRLHF


@pytest.mark.parametrize(
    ("prompts", "samples", "trained", "updates", "note"),
    [
        ("128", "8", "256", 4, "128 × 8 / 256 = 4 optimizer steps"),
        ("128", "8", "1024", 1, "= 1 optimizer step for"),
        ("100", "8", "128", 6, "= 6.25 optimizer steps for each batch, which Trimtab cannot do: 6 is the nearest"),
        ("16", "4", "128", 1, "= 0.5 optimizer steps for each batch, which Trimtab cannot do: 1 is the nearest"),
        ("2", "16", "4", 2, "2 is the nearest"),
    ],
)
def test_openrlhf_batches_of_samples_become_updates(
    prompts: str, samples: str, trained: str, updates: int, note: str
) -> None:
    found = openrlhf("--rollout_batch_size", prompts, "--n_samples_per_prompt", samples, "--train_batch_size", trained)
    assert keys(found)["learn.prompts_per_step"] == int(prompts) and keys(found)["learn.samples_per_prompt"] == int(
        samples
    )
    assert keys(found)["learn.updates_per_step"] == updates
    assert note in row(found, "--train_batch_size")["note"]


def test_openrlhf_old_and_new_names_give_the_same_config() -> None:
    old = openrlhf(
        "--init_kl_coef",
        "0.1",
        "--actor_learning_rate",
        "1e-7",
        "--eps_clip",
        "0.1",
        "--use_kl_loss",
        "--kl_estimator",
        "k2",
    )
    new = openrlhf(
        "--algo.kl.init_coef", "0.1", "--actor.adam.lr", "1e-7", "--actor.eps_clip", "0.1", "--algo.kl.use_loss",
        "--algo.kl.estimator", "k2"
    )  # fmt: skip
    assert old.sheet.tree() == new.sheet.tree()
    assert "Today's name is --algo.kl.init_coef" in row(old, "--init_kl_coef")["note"]
    assert row(old, "--init_kl_coef")["key"] == "learn.kl.coef"


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("group_norm", {"learn.algorithm": "grpo", "learn.aggregate": "token_mean"}),
        ("dr_grpo", {"learn.algorithm": "dr_grpo", "learn.aggregate": "token_mean"}),
        ("rloo", {"learn.algorithm": "rloo"}),
        ("reinforce", {"learn.algorithm": "reinforce_pp"}),
        ("reinforce_baseline", {"learn.algorithm": "reinforce_pp_baseline"}),
    ],
)
def test_openrlhf_estimators(estimator: str, expected: dict[str, str]) -> None:
    found = openrlhf("--advantage_estimator", estimator, "--n_samples_per_prompt", "4")
    assert expected.items() <= keys(found).items() and row(found, "--advantage_estimator")["outcome"] == "mapped"


CRITIC_OF_OPENRLHF = {"learn.critic.lr": 9e-6, "learn.critic.clip": 0.5, "learn.critic.lam": 1.0}


def test_openrlhf_ppo_is_what_it_does_unless_told_otherwise() -> None:
    found = keys(openrlhf("--pretrain", "m"))
    assert {"learn.algorithm": "ppo", **CRITIC_OF_OPENRLHF}.items() <= found.items()
    assert {key for key in found if key.startswith("learn.critic")} == set(CRITIC_OF_OPENRLHF)


def test_openrlhf_critic() -> None:
    words = ["--critic_learning_rate", "5e-6", "--gamma", "0.99", "--lambd", "0.95", "--value_clip", "0.2"]
    found = openrlhf(*words, "--freezing_actor_steps", "10", "--critic_pretrain", "c")
    assert {
        "learn.critic.lr": 5e-6,
        "learn.critic.gamma": 0.99,
        "learn.critic.lam": 0.95,
        "learn.critic.clip": 0.2,
        "learn.critic.warmup_steps": 10,
        "learn.critic.path": "c",
    }.items() <= keys(found).items()
    assert {line.outcome for line in found.lines} == {"mapped"}
    new = openrlhf("--critic.adam.lr", "5e-6", "--algo.advantage.lambd", "0.95", "--critic.freezing_steps", "-1")
    assert {"learn.critic.lr": 5e-6, "learn.critic.lam": 0.95, "learn.critic.warmup_steps": 0}.items() <= keys(
        new
    ).items()


def test_openrlhf_critic_flags_do_nothing_without_a_critic() -> None:
    words = ["--critic_learning_rate", "9e-6", "--critic_num_nodes", "2", "--gamma", "0.9", "--critic.adam.eps", "1e-5"]
    found = openrlhf("--advantage_estimator", "group_norm", "--n_samples_per_prompt", "4", *words)
    assert [line.outcome for line in found.lines] == ["mapped", "mapped", "dead", "dead", "dead", "dead"]
    assert "group_norm has no critic" in row(found, "--critic_num_nodes")["note"]
    assert not any(key.startswith("learn.critic") for key in keys(found)) and not any(
        "critic" in line.setting.name for line in found.assumed
    )
    discounted = row(openrlhf("--advantage_estimator", "reinforce", "--gamma", "0.9"), "--gamma")
    assert discounted["outcome"] == "unsupported" and "in Trimtab only PPO does" in discounted["note"]
    assert row(openrlhf("--advantage_estimator", "reinforce", "--gamma", "1"), "--gamma")["outcome"] == "dead"


def test_openrlhf_a_critic_has_the_policys_optimizer() -> None:
    found = openrlhf("--critic.adam.betas", "0.9", "0.95", "--critic.lr_warmup_ratio", "0.1", "--no_advantage_std_norm")
    assert [line.outcome for line in found.lines] == ["automatic", "unsupported", "unsupported"]
    assert "only its learning rate is separate" in row(found, "--critic.lr_warmup_ratio")["note"]
    assert "divides advantages by their standard deviation" in row(found, "--no_advantage_std_norm")["note"]


def test_openrlhf_a_reward_model_and_other_stages_say_what_to_do() -> None:
    found = openrlhf("--reward_pretrain", "rm", "--output_key", "answer", "--chosen_key", "good")
    assert keys(found)["reward.0.fn"] == "model:rm"
    assert {row(found, flag)["outcome"] for flag in ("--output_key", "--chosen_key")} == {"unsupported"}
    note = row(found, "--reward_pretrain")["note"]
    assert "serve any other kind" in note and "starts the critic from it too" in note
    assert "trimtab sft" in row(found, "--output_key")["note"]
    assert "trimtab reward-model" in row(found, "--chosen_key")["note"]


def test_openrlhf_kl_target_of_a_completion_becomes_one_of_a_token() -> None:
    found = openrlhf("--init_kl_coef", "0.01", "--kl_target", "6", "--kl_horizon", "5000", "--max_new_tokens", "1000")
    assert keys(found)["learn.kl.target"] == 0.006 and keys(found)["learn.kl.horizon"] == 5000
    assert keys(openrlhf("--kl_target", "0.05"))["learn.kl.target"] == 0.05
    assert row(openrlhf("--kl_horizon", "5000"), "--kl_horizon")["outcome"] == "dead"
    off = openrlhf("--init_kl_coef", "0", "--kl_target", "6")
    assert keys(off).get("learn.kl.target") is None and "learn.kl.where" not in keys(off)


def test_openrlhf_lengths() -> None:
    assert keys(openrlhf("--max_len", "3072", "--max_new_tokens", "2048"))["data.max_prompt_tokens"] == 1024
    only = keys(openrlhf("--max_len", "4096"))
    assert only["learn.max_new_tokens"] == 2048 and only["data.max_prompt_tokens"] == 2048
    old = keys(openrlhf("--prompt_max_len", "512", "--generate_max_len", "256"))
    assert old["learn.max_new_tokens"] == 256 and old["data.max_prompt_tokens"] == 512


def test_openrlhf_clip() -> None:
    assert {"learn.clip.low": 0.1, "learn.clip.high": 0.1}.items() <= keys(openrlhf("--eps_clip", "0.1")).items()
    found = openrlhf("--eps_clip", "0.1", "--eps_clip_low_high", "0.2", "0.28")
    assert {"learn.clip.low": 0.2, "learn.clip.high": 0.28}.items() <= keys(found).items()
    assert (
        "loosens the clip" in row(found, "--eps_clip_low_high")["note"]
        and row(found, "--eps_clip")["outcome"] == "dead"
    )
    bad = openrlhf("--dual_clip", "0.5")
    assert row(bad, "--dual_clip")["outcome"] == "unsupported" and "above 1" in row(bad, "--dual_clip")["note"]


def test_openrlhf_k1_in_the_loss_penalises_nothing() -> None:
    found = openrlhf("--use_kl_loss", "--kl_estimator", "k1")
    assert (
        row(found, "--kl_estimator")["outcome"] == "unsupported"
        and "gradient of zero" in row(found, "--kl_estimator")["note"]
    )
    assert "learn.kl.estimator" not in keys(found)


def test_openrlhf_rewards() -> None:
    assert keys(openrlhf("--remote_rm_url", "my/rewards.py"))["reward.0.fn"] == "my/rewards.py:reward_func"
    assert row(openrlhf("--remote_rm_url", "http://h:5000"), "--remote_rm_url")["outcome"] == "unsupported"


def test_openrlhf_secrets_are_not_repeated() -> None:
    found = openrlhf("--use_wandb", "0123456789", "--wandb_project", "mine")
    assert "0123456789" not in str(found.as_dict()) + found.yaml and keys(found)["observe.wandb"] == "mine"


# --- verl


@pytest.mark.parametrize(("prompts", "mini", "updates"), [("1024", "256", 4), ("100", "30", 3), ("64", "256", 1)])
def test_verl_mini_batches_become_updates(prompts: str, mini: str, updates: int) -> None:
    found = verl(
        f"data.train_batch_size={prompts}",
        f"A.actor.ppo_mini_batch_size={mini}",
        "A.rollout.n=5",
        "A.actor.ppo_epochs=2",
    )
    assert keys(found)["learn.prompts_per_step"] == int(prompts) and keys(found)["learn.updates_per_step"] == updates
    assert keys(found)["learn.samples_per_prompt"] == 5 and keys(found)["learn.epochs_per_step"] == 2


def test_verl_kl_in_the_loss_in_the_reward_and_not_at_all() -> None:
    loss = keys(verl("A.actor.use_kl_loss=True", "A.actor.kl_loss_coef=0.01", "A.actor.kl_loss_type=mse"))
    assert {"learn.kl.coef": 0.01, "learn.kl.estimator": "k2", "learn.kl.where": "loss"}.items() <= loss.items()
    reward = keys(
        verl("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=5000")
    )
    assert {"learn.kl.coef": 0.001, "learn.kl.estimator": "k1", "learn.kl.where": "reward"}.items() <= reward.items()
    assert reward["learn.kl.target"] == 0.1 and reward["learn.kl.horizon"] == 5000
    off = verl("A.actor.kl_loss_coef=0.01", "algorithm.kl_ctrl.kl_coef=0.1")
    assert [line.outcome for line in off.lines] == ["dead", "dead"] and "learn.kl.coef" not in keys(off)


def test_verl_ppo_and_its_critic() -> None:
    usual = keys(verl("A.model.path=m"))
    assert {"learn.algorithm": "ppo", "learn.critic.clip": 0.5, "learn.critic.lam": 1.0}.items() <= usual.items()
    found = keys(
        verl(
            "algorithm.adv_estimator=gae",
            "critic.optim.lr=2e-5",
            "critic.model.path=c",
            "critic.cliprange_value=0.3",
            "algorithm.gamma=0.99",
            "algorithm.lam=0.9",
            "trainer.critic_warmup=5",
        )
    )
    assert {
        "learn.critic.lr": 2e-5,
        "learn.critic.path": "c",
        "learn.critic.clip": 0.3,
        "learn.critic.gamma": 0.99,
        "learn.critic.lam": 0.9,
        "learn.critic.warmup_steps": 4,
    }.items() <= found.items()
    assert keys(verl("trainer.critic_warmup=0"))["learn.critic.warmup_steps"] == 0


def test_verl_what_trimtab_decides_for_a_critic() -> None:
    words = ["critic.ppo_micro_batch_size_per_gpu=8", "critic.fsdp.param_offload=True", "critic.megatron.context=2"]
    found = verl(
        *words, "critic.optim.weight_decay=0.01", "critic.optim.weight_decay_incr_style=x", "critic.ppo_epochs=3"
    )
    assert [line.outcome for line in found.lines] == ["automatic"] * 4 + ["unsupported"] * 2
    assert "actor_rollout_ref.actor.optim.weight_decay" in row(found, "critic.optim.weight_decay")["note"]


def test_verl_critic_keys_do_nothing_without_a_critic() -> None:
    words = ["critic.optim.lr=1e-5", "critic.use_dynamic_bsz=True", "critic.enable=True", "trainer.critic_warmup=3"]
    found = verl("algorithm.adv_estimator=grpo", "A.rollout.n=8", *words, "algorithm.gamma=0.9", "algorithm.lam=0.9")
    assert [line.outcome for line in found.lines] == ["mapped"] * 2 + ["dead"] * 6
    assert not any(key.startswith("learn.critic") for key in keys(found))
    discounted = verl("algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9")
    assert row(discounted, "algorithm.gamma")["outcome"] == "unsupported"


def test_verl_clip_ratio_alone_is_dead() -> None:
    found = verl("A.actor.clip_ratio=0.1")
    assert found.lines[0].outcome == "dead" and "learn.clip.low" not in keys(found)
    both = keys(verl("A.actor.clip_ratio_low=0.2", "A.actor.clip_ratio_high=0.28", "A.actor.clip_ratio_c=10"))
    assert {"learn.clip.low": 0.2, "learn.clip.high": 0.28, "learn.clip.dual": 10.0}.items() <= both.items()


def test_verl_keeps_its_defaults_in_sight() -> None:
    found = verl("algorithm.adv_estimator=grpo", "A.rollout.n=8")
    assert {
        "learn.aggregate": "token_mean",
        "learn.clip.dual": 3.0,
        "learn.optimizer.weight_decay": 0.01,
    }.items() <= keys(found).items()
    assert "actor_rollout_ref.actor.clip_ratio_c" in [line.setting.name for line in found.assumed]
    assert "# verl's default of actor_rollout_ref.actor.clip_ratio_c" in found.yaml


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["A.actor.loss_agg_mode=seq-mean-token-mean"], {"learn.aggregate": "sequence_mean"}),
        (["A.actor.loss_agg_mode=seq-mean-token-sum-norm"], {"learn.aggregate": "constant"}),
        (["A.actor.policy_loss.loss_mode=gspo"], {"learn.loss": "gspo", "learn.aggregate": "sequence_mean"}),
        (["algorithm.norm_adv_by_std_in_grpo=False"], {"learn.advantage": "group_mean"}),
        (["algorithm.rollout_correction.rollout_is=token"], {"learn.importance.level": "token"}),
        (["A.model.lora_rank=32"], {"model.lora.r": 32, "model.lora.alpha": 16.0}),
        (["trainer.total_training_steps=50", "A.actor.optim.lr_warmup_steps_ratio=0.1"], {"learn.schedule.warmup_steps": 5}),
        (["custom_reward_function.path=a.py", "custom_reward_function.name=f"], {"reward.0.fn": "a.py:f"}),
        (["reward.custom_reward_function.path=a.py"], {"reward.0.fn": "a.py:compute_score"}),
        (["algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=10"],
         {"learn.dynamic_sampling.enabled": True, "learn.dynamic_sampling.max_refills": 9}),
        (["+reward.reward_kwargs.overlong_buffer_cfg.enable=True", "+reward.reward_kwargs.overlong_buffer_cfg.len=64"],
         {"learn.overlong.buffer": 64}),
        (["data.train_files=['a.parquet','b.parquet']"], {"data.train": "a.parquet"}),
    ],
)  # fmt: skip
def test_verl_keys(words: list[str], expected: dict[str, Any]) -> None:
    found = keys(verl("algorithm.adv_estimator=grpo", "A.rollout.n=8", *words))
    assert expected.items() <= found.items()


def test_names_that_guides_use_and_verl_never_had() -> None:
    found = convert("verl", text="rollout:\n  tensor_parallel_size: 4\ngeneration:\n  max_new_tokens: 1024\n")
    assert keys(found)["learn.max_new_tokens"] == 1024
    assert (
        "verl has no generation.max_new_tokens; data.max_response_length is meant" in found.lines[1].as_dict()["note"]
    )


# --- TRL


@pytest.mark.parametrize(
    ("words", "prompts", "updates"),
    [
        (["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "8", "--num_generations", "16"], 2, None),
        (["accelerate", "launch", "--num_processes", "8", "t.py", "--per_device_train_batch_size", "4",
          "--gradient_accumulation_steps", "8", "--num_generations", "16"], 16, None),
        (["--generation_batch_size", "256", "--per_device_train_batch_size", "8", "--num_generations", "8"], 32, 32),
        (["--steps_per_generation", "8", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2",
          "--num_generations", "8"], 8, 4),
        (["--per_device_train_batch_size", "6", "--num_generations", "4"], 2, None),
    ],
)  # fmt: skip
def test_trl_completions_become_prompts(words: list[str], prompts: int, updates: int | None) -> None:
    found = keys(trl(*words))
    assert found["learn.prompts_per_step"] == prompts and found.get("learn.updates_per_step") == updates


def test_trl_says_when_a_batch_holds_no_whole_groups() -> None:
    found = trl("--per_device_train_batch_size", "6", "--num_generations", "4")
    assert (
        "6 / 4 = 1.5 prompts, which TRL refuses; 2 is the nearest"
        in row(found, "--per_device_train_batch_size")["note"]
    )


def test_trl_counts_optimizer_steps() -> None:
    words = [
        "--steps_per_generation",
        "4",
        "--gradient_accumulation_steps",
        "2",
        "--num_iterations",
        "2",
        "--max_steps",
        "400",
    ]
    found = keys(trl(*words, "--save_steps", "40", "--warmup_steps", "20", "--num_generations", "4"))
    assert (
        found["learn.steps"] == 100
        and found["observe.checkpoint_every"] == 10
        and found["learn.schedule.warmup_steps"] == 20
        and found["learn.schedule.unit"] == "update"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"learn.aggregate": "token_mean"}),
        (["--loss_type", "grpo"], {"learn.algorithm": "grpo", "learn.aggregate": "sequence_mean"}),
        (["--loss_type", "dr_grpo"], {"learn.aggregate": "constant", "learn.advantage": "group_std"}),
        (["--loss_type", "dr_grpo", "--scale_rewards", "none"], {"learn.aggregate": "constant", "learn.advantage": "group_mean"}),
        (["--scale_rewards", "batch"], {"learn.advantage": "group_mean_batch_std"}),
        (["--loss_type", "cispo", "--epsilon_high", "5"], {"learn.algorithm": "cispo", "learn.clip.high": 4.0}),
        (["--importance_sampling_level", "sequence"], {"learn.loss": "gspo"}),
        (["--epsilon", "0.1"], {"learn.clip.low": 0.1, "learn.clip.high": 0.1}),
        (["--epsilon", "0.1", "--epsilon_high", "0.3"], {"learn.clip.low": 0.1, "learn.clip.high": 0.3}),
        (["--max_grad_norm", "0.5"], {"learn.max_grad_norm": 0.5}),
        (["--max_grad_norm", "0"], {"learn.max_grad_norm": None}),
        (["--delta", "4"], {"learn.clip.dual": 4.0}),
        (["--beta", "0.04"], {"learn.kl.coef": 0.04}),
        (["--use_peft"], {"model.lora.r": 16, "model.lora.alpha": 32.0}),
        (["--use_peft", "--lora_r", "8", "--lora_alpha", "8"], {"model.lora.r": 8, "model.lora.alpha": 8.0}),
        (["--dataset_name", "a/b", "--dataset_config", "main"], {"data.train": "a/b:main"}),
        (["--reward_funcs", "accuracy_reward", "my.mod.fn", "--reward_weights", "1", "0.5"],
         {"reward.0.fn": "math", "reward.1.fn": "my.mod:fn", "reward.1.weight": 0.5}),
        (["--use_vllm", "--vllm_importance_sampling_mode", "token_truncate"],
         {"learn.importance.level": "token", "learn.importance.mode": "truncate", "learn.importance.cap": 3.0}),
    ],
)  # fmt: skip
def test_trl_arguments(words: list[str], expected: dict[str, Any]) -> None:
    assert expected.items() <= keys(trl("--model_name_or_path", "m", *words)).items()


MIN_LR = ["--lr_scheduler_type", "cosine_with_min_lr", "--lr_scheduler_kwargs"]


@pytest.mark.parametrize(
    ("words", "final"),
    [
        ([*MIN_LR, '{"min_lr_rate": 0.1}'], 0.1),
        ([*MIN_LR, '{"min_lr": 1e-7}'], 0.1),
        ([*MIN_LR, '{"min_lr": 1e-6}', "--learning_rate", "2e-5"], 0.05),
        ([*MIN_LR, '{"min_lr": 6e-7}', "--lam", "0.9"], 0.2),
    ],
)
def test_trl_a_cosine_ends_where_its_kwargs_say(words: list[str], final: float) -> None:
    found = trl(*words)
    assert keys(found)["learn.schedule.kind"] == "cosine" and keys(found)["learn.schedule.final"] == final
    assert row(found, "--lr_scheduler_kwargs")["key"] == "learn.schedule.final"


def test_trl_kwargs_are_read_from_yaml_and_python_too() -> None:
    yaml = "lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs:\n  min_lr_rate: 0.1\n  num_cycles: 1\n"
    found = convert("trl", text=f"{yaml}gradient_checkpointing_kwargs: {{use_reentrant: false}}\n")
    assert keys(found)["learn.schedule.final"] == 0.1
    assert [line.outcome for line in found.lines] == ["mapped", "mapped", "unsupported", "automatic"]
    python = "c = GRPOConfig(lr_scheduler_type='cosine_with_min_lr', lr_scheduler_kwargs={'min_lr_rate': 0.1, 'x': 1})"
    found = convert("trl", text=python)
    assert (
        keys(found)["learn.schedule.final"] == 0.1
        and "Trimtab does not have x" in row(found, "lr_scheduler_kwargs")["note"]
    )


def test_trl_kwargs_that_no_cosine_takes_are_told() -> None:
    linear = row(trl("--lr_scheduler_kwargs", '{"min_lr_rate": 0.1}'), "--lr_scheduler_kwargs")
    assert linear["outcome"] == "unsupported" and "the schedule is linear" in linear["note"]
    assert row(trl("--lr_scheduler_kwargs", "null"), "--lr_scheduler_kwargs")["outcome"] == "dead"
    assert "takes names and values" in trl(*MIN_LR, "0.1").lines[1].as_dict()["note"].lower()
    without = trl(*MIN_LR[:2])
    assert "Trimtab lets it end at 0" in without.lines[0].as_dict()["note"] and "learn.schedule.final" not in keys(
        without
    )
    both = trl(
        "--lr_scheduler_type=cosine_with_min_lr", *[f"--{MIN_LR[2][2:]}.{p}=0.1" for p in ("min_lr_rate", "min_lr")]
    )
    assert keys(both)["learn.schedule.final"] == 0.1 and both.lines[2].outcome == "dead"


def test_trl_evaluation() -> None:
    found = keys(trl("--dataset_name", "a/b", "--eval_strategy", "steps", "--eval_steps", "50"))
    assert found["data.eval"] == "a/b" and found["observe.eval_every"] == 50
    off = trl("--eval_steps", "50", "--dataset_name", "a/b")
    assert row(off, "--eval_steps")["outcome"] == "dead" and "observe.eval_every" not in keys(off)
    weights = trl("--reward_funcs", "a.b", "--reward_weights", "1", "2")
    assert "2 weights for 1 reward functions" in row(weights, "--reward_weights")["note"]


def test_trl_corrects_its_kl_unless_it_is_told_not_to() -> None:
    assert keys(trl("--beta", "0.04"))["learn.kl.corrected"] is True
    assert keys(trl("--beta", "0.04", "--use_bias_correction_kl", "True"))["learn.kl.corrected"] is True
    plain = trl("--beta", "0.04", "--use_bias_correction_kl", "False")
    assert "learn.kl.corrected" not in keys(plain) and row(plain, "--use_bias_correction_kl")["outcome"] == "dead"
    assert "learn.kl.corrected" not in keys(trl("--use_bias_correction_kl", "True"))


def test_trl_ppo_with_its_own_defaults() -> None:
    found = trl("--total_episodes", "1000", "--per_device_train_batch_size", "64", "--model_name_or_path", "m")
    assert {
        "learn.algorithm": "ppo",
        "learn.samples_per_prompt": 1,
        "learn.prompts_per_step": 64,
        "learn.steps": 16,
        "learn.epochs_per_step": 4,
        "learn.max_new_tokens": 53,
        "learn.lr": 3e-6,
        "learn.critic.lr": 3e-6,
        "learn.sampling.temperature": 0.7,
        "learn.kl.coef": 0.05,
        "learn.kl.estimator": "k1",
        "learn.kl.where": "reward",
    }.items() <= keys(found).items()
    assert "learn.aggregate" not in keys(found) and "PPOConfig has it" in row(found, "--total_episodes")["note"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--lam", "0.9", "--gamma", "0.99", "--cliprange_value", "0.3"],
         {"learn.critic.lam": 0.9, "learn.critic.gamma": 0.99, "learn.critic.clip": 0.3}),
        (["--cliprange", "0.1"], {"learn.clip.low": 0.1, "learn.clip.high": 0.1}),
        (["--vf_coef", "0.1", "--learning_rate", "1e-6"], {"learn.lr": 1e-6, "learn.critic.lr": 1e-6}),
        (["--num_mini_batches", "4", "--per_device_train_batch_size", "64"], {"learn.updates_per_step": 4}),
        (["--num_mini_batches", "4", "--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "16"],
         {"learn.updates_per_step": 1, "learn.prompts_per_step": 128}),
        (["--sft_model_path", "s", "--model_name_or_path", "m"], {"model.path": "s"}),
        (["--kl_coef", "0.1", "--kl_estimator", "k3"], {"learn.kl.coef": 0.1, "learn.kl.estimator": "k3"}),
        (["--stop_token_id", "7"], {"learn.sampling.stop_token_ids": [7]}),
        (["--response_length", "128", "--save_steps", "20", "--num_mini_batches", "2"], {"observe.checkpoint_every": 20}),
    ],
)  # fmt: skip
def test_trl_arguments_of_ppo(words: list[str], expected: dict[str, Any]) -> None:
    found = keys(trl(*words))
    assert found["learn.algorithm"] == "ppo" and expected.items() <= found.items()


def test_trl_ppos_arguments_do_nothing_for_grpo() -> None:
    found = trl("--num_generations", "8", "--lam", "0.9", "--num_ppo_epochs", "2")
    assert "learn.algorithm" not in keys(found) and "learn.critic.lam" not in keys(found)
    assert [line.outcome for line in found.lines] == ["mapped", "dead", "dead"]
    assert "learn.epochs_per_step" not in keys(found)


def test_trl_ppo_in_python() -> None:
    found = convert("trl", text="from trl import PPOConfig\nc = PPOConfig(lam=0.9, reward_model_path='rm')\n")
    assert keys(found)["learn.critic.lam"] == 0.9 and "serve any other kind" in row(found, "reward_model_path")["note"]


# --- nanochat and scripts


def test_nanochat_knows_its_task() -> None:
    found = convert("nanochat", words=["EXAMPLES_PER_STEP=64", "NUM_SAMPLES=32", "DEVICE_BATCH_SIZE=6"])
    assert keys(found)["learn.steps"] == 7473 // 64 == 116
    assert {"learn.prompts_per_step": 64, "learn.samples_per_prompt": 32, "learn.max_new_tokens": 256}.items() <= keys(
        found
    ).items()
    assert "silently trains on 30 samples; Trimtab trains on all 32" in row(found, "NUM_SAMPLES")["note"]
    assert row(found, "DEVICE_BATCH_SIZE") | {"note": ""} == {
        "flag": "DEVICE_BATCH_SIZE", "value": 6, "outcome": "automatic", "key": "run.token_budget", "note": ""
    }  # fmt: skip


def test_a_script_keeps_its_effective_batch() -> None:
    def prompts(text: str) -> int:
        return int(keys(convert("script", text=text))["learn.prompts_per_step"])

    assert prompts("GRPO_BATCH_SIZE = 4") == 4
    assert prompts("GRPO_BATCH_SIZE = 2\nGRADIENT_ACCUMULATION_STEPS = 2") == 4
    assert prompts("GRPO_BATCH_SIZE = 1\nGRADIENT_ACCUMULATION_STEPS = 4") == 4
    alone = convert("script", text="GRADIENT_ACCUMULATION_STEPS = 4")
    assert alone.lines[0].outcome == "unsupported"


# --- all


def test_the_last_of_two_counts() -> None:
    found = openrlhf("--temperature", "0.7", "--rollout.temperature", "0.8")
    assert [line.outcome for line in found.lines] == ["dead", "mapped"]
    assert keys(found)["learn.sampling.temperature"] == 0.8


def test_a_value_that_refers_to_another_key_counts_there() -> None:
    found = convert(
        "verl",
        text="critic:\n  ppo_epochs: ${oc.select:actor.ppo_epochs,1}\ndata:\n  train_batch_size: ${data.gen_batch_size}\n",
    )
    assert [line.outcome for line in found.lines] == ["dead", "dead"] and keys(found)["learn.prompts_per_step"] == 1024


def test_what_the_loader_takes_out_is_asked_for_again() -> None:
    found = openrlhf("--pretrain=", "--remote_rm_url=r.py", "--prompt_data=")
    assert {item.key for item in found.sheet.missing if item.required} == {"model.path", "data.train"}
    assert "is empty" in found.lines[0].as_dict()["note"]


def test_what_the_loader_refuses_is_left_out_in_its_words() -> None:
    found = openrlhf("--temperature", "0", "--top_p", "1.5", "--actor_learning_rate", "fast")
    assert [line.outcome for line in found.lines] == ["unsupported"] * 3
    assert "greedy" in found.lines[0].as_dict()["note"] and "at most 1" in found.lines[1].as_dict()["note"]
    assert "takes a number, not 'fast'" in found.lines[2].as_dict()["note"].lower()


def test_variables_that_only_a_shell_knows_are_pointed_out() -> None:
    found = convert("verl", text="python3 -m verl.trainer.main_ppo data.train_files=$HOME/train.parquet")
    assert "Only the shell knows" in found.lines[0].as_dict()["note"]
    listed = convert(
        "verl",
        text="train=$HOME/train.parquet\npython3 -m verl.trainer.main_ppo data.train_files=\"['$train']\" a.b=[1]\n",
    )
    assert keys(listed)["data.train"] == "$HOME/train.parquet"
    assert ["Only the shell knows" in line.as_dict()["note"] for line in listed.lines] == [True, False]


def test_passes_over_the_data_are_worked_out_as_far_as_they_can_be() -> None:
    found = verl("trainer.total_epochs=15", "data.train_batch_size=512")
    assert ("learn.steps", False) in [(item.key, item.required) for item in found.sheet.missing]
    assert "15 × rows // 512" in found.lines[0].as_dict()["note"]


@pytest.mark.parametrize(
    ("kind", "words", "name", "formula"),
    [
        ("trl", ["--model_name_or_path=x", "--dataset_name=y"], "num_train_epochs", "3 × rows // 1"),
        ("trl", ["--lam=0.9", "--per_device_train_batch_size=64"], "num_train_epochs", "3 × rows // 64"),
        ("verl", ["actor_rollout_ref.model.path=x"], "trainer.total_epochs", "30 × rows // 1024"),
        ("openrlhf", ["--pretrain=x"], "train.num_episodes", "1 × rows // 1024"),
        ("openrlhf", ["--max_samples=100000"], "train.num_episodes", "(at most 97, as data.limit is 100000)"),
    ],
)
def test_passes_that_are_not_given_are_the_other_frameworks(
    kind: str, words: list[str], name: str, formula: str
) -> None:
    found = convert(kind, words=words)
    (line,) = [line.as_dict() for line in found.assumed if line.setting.name == name]
    assert line["outcome"] == "unsupported" and formula in line["note"]
    (missing,) = [item for item in found.sheet.missing if item.key == "learn.steps"]
    assert formula in missing.what and not missing.required and "learn.steps" not in keys(found)


@pytest.mark.parametrize(
    ("kind", "word", "name"),
    [
        ("trl", "--max_steps=50", "num_train_epochs"),
        ("trl", "--total_episodes=400", "num_train_epochs"),
        ("verl", "trainer.total_training_steps=50", "trainer.total_epochs"),
    ],
)
def test_passes_do_not_count_beside_steps(kind: str, word: str, name: str) -> None:
    found = convert(kind, words=[word])
    assert keys(found)["learn.steps"] == 50
    assert name not in [line.setting.name for line in found.assumed]
    assert "learn.steps" not in [item.key for item in found.sheet.missing]


def test_passes_that_are_no_number_are_told_and_counted_as_the_default() -> None:
    found = openrlhf("--num_episodes", "many")
    assert "takes a number, not 'many'" in found.lines[0].as_dict()["note"].lower()
    assert any("1 × rows // 1024" in item.what for item in found.sheet.missing)


@pytest.mark.parametrize("name", ["adamw_8bit", "paged_adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit", "AdamW8bit"])
def test_moments_of_8_bits_are_a_setting_of_their_own(name: str) -> None:
    for found in (
        trl("--optim", name),
        convert("verl", words=(f"actor_rollout_ref.actor.optim.optimizer={name}",)),
        openrlhf("--actor.optim", name),
    ):
        assert keys(found)["learn.optimizer.states"] == "8bit"
    paged = row(trl("--optim", name), "--optim")
    assert ("run.offload.optimizer" in paged["note"]) == name.startswith("paged")


def test_other_optimizers_are_said_not_to_be_here() -> None:
    for name in ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused"):
        assert row(trl("--optim", name), "--optim")["outcome"] == "automatic"
    for name in ("adafactor", "lion_8bit", "paged_lion_32bit", "adamax", "sgd"):
        found = row(trl("--optim", name), "--optim")
        assert found["outcome"] == "unsupported" and "it trains with AdamW" in found["note"]


def test_a_reward_model_is_a_part_of_the_reward() -> None:
    assert keys(openrlhf("--reward_pretrain", "org/rm"))["reward.0.fn"] == "model:org/rm"
    two = keys(openrlhf("--reward.model_name_or_path", "a/one, b/two"))
    assert (two["reward.0.fn"], two["reward.1.fn"]) == ("model:a/one", "model:b/two")
    assert "reward.0.name" not in two and two["reward.1.name"] == "reward_model_1"
    asked = openrlhf("--reward_pretrain", "org/rm", "--reward.remote_url", "mine.py")
    assert keys(asked)["reward.0.fn"] == "mine.py:reward_func" and row(asked, "--reward_pretrain")["outcome"] == "dead"
    on = convert("verl", words=("reward_model.enable=true", "reward_model.model.path=org/rm"))
    assert keys(on)["reward.0.fn"] == "model:org/rm"
    off = convert("verl", words=("reward_model.model.path=org/rm",))
    assert "reward.0.fn" not in keys(off) and row(off, "reward_model.model.path")["outcome"] == "dead"
    both = ("custom_reward_function.path=r.py", "reward_model.enable=true", "reward_model.model.path=org/rm")
    parts = keys(convert("verl", words=both))
    assert (parts["reward.0.fn"], parts["reward.1.fn"]) == ("r.py:compute_score", "model:org/rm")
    assert keys(trl("--lam", "0.9", "--reward_model_path", "org/rm"))["reward.0.fn"] == "model:org/rm"
    weighed = keys(
        trl("--reward_model_name_or_path", "org/rm", "--reward_funcs", "a.b", "x/y", "--reward_weights", "1", "2", "3")
    )
    assert [weighed[f"reward.{n}.fn"] for n in range(3)] == ["model:org/rm", "a:b", "model:x/y"]
    assert weighed["reward.2.name"] == "reward_model_2"
    assert [weighed[f"reward.{n}.weight"] for n in range(3)] == [1.0, 2.0, 3.0]
