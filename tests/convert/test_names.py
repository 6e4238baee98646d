"""A name that is not known comes with the nearest that is; a slip inside a family of keys is no key of it, and a real key is."""

from __future__ import annotations

import pytest

from trimtab.convert import convert

A = "actor_rollout_ref."
REAL = [
    ("A.actor.fsdp_config", "grad_offload offload_policy tp_size ulysses_parallel_size wrap_policy.min_num_params"),
    ("A.actor.fsdp_config", "entropy_from_logits_chunk_size activation_checkpointing mixed_precision"),
    ("A.ref.fsdp_config", "grad_offload optimizer_offload reshard_after_forward model_dtype"),
    (
        "A.actor.optim",
        "init_lr_ratio min_lr min_lr_factor lr_decay_steps lr_decay_style lr_warmup_init num_cycles name",
    ),
    ("A.rollout.checkpoint_engine", "engine_kwargs custom_backend_module"),
    ("A.rollout.agent", "agent_loop_config_path default_agent_loop"),
    ("A.actor.policy_loss", "clip_cov_ratio kl_cov_ratio ppo_kl_coef"),
    ("algorithm.rollout_correction", "rollout_rs_threshold rollout_rs_threshold_lower rollout_token_veto_threshold"),
    ("critic", "model.lora.alpha model.lora.rank model.lora.type model.target_modules model.external_lib model.mtp"),
    (
        "critic",
        "ppo_infer_micro_batch_size_per_gpu ppo_infer_max_token_len_per_gpu model.override_config.attn_implementation",
    ),
    ("critic.model.fsdp_config", "grad_offload reshard_after_forward fsdp_size"),
    ("critic.optim", "weight_decay betas clip_grad lr_warmup_steps lr_warmup_steps_ratio min_lr_ratio optimizer"),
    ("reward_model", "reward_kwargs.overlong_buffer_cfg.log overlong_buffer.log reward_kwargs.max_resp_len"),
    ("reward_model", "sandbox_fusion sandbox_fusion.max_concurrent reward_manager.name megatron.use_remove_padding"),
    ("reward_model", "mini_batch_size model.update model.external_lib"),
    ("ray_kwargs", "ray_init.num_gpus timeline_json_file"),
]
"""Keys of verl's that are in a family and near to a key that has a rule of its own; of its releases 0.2 to 0.9."""


def note(kind: str, word: str) -> str:
    line = convert(kind, words=[word]).lines[0].as_dict()
    assert line["outcome"] == "unsupported" and line["key"] is None
    return str(line["note"])


@pytest.mark.parametrize(
    ("kind", "word", "near"),
    [
        ("openrlhf", "--zero_stagee=3", "--zero_stage"),
        ("openrlhf", "--lambda=0.95", "--lambd"),
        ("openrlhf", "--wandb_run_nme=a", "--wandb_run_name"),
        ("openrlhf", "--ds.zero_stag=3", "--ds.zero_stage"),
        ("verl", f"{A}rollout.temperatur=1", f"{A}rollout.temperature"),
        ("verl", "foo.ppo_mini_batch_size=1", f"{A}actor.ppo_mini_batch_size"),
        ("verl", "actor_rolout_ref.actor.grad_clip=1", f"{A}actor.grad_clip"),
        ("verl", "actor_rolout_ref.actor.ppo_epochs=1", f"{A}actor.ppo_epochs"),
        ("trl", "--num_generation=8", "--num_generations"),
        ("nanochat", "--num-sample=8", "--num_samples"),
    ],
)
def test_an_unknown_flag_comes_with_the_nearest(kind: str, word: str, near: str) -> None:
    assert f"Did you mean {near}?" in note(kind, word)


def test_the_nearest_comes_with_todays_name() -> None:
    assert note("openrlhf", "--lambda=1").endswith("Did you mean --lambd? Today's name is --algo.advantage.lambd.")
    assert note("trl", "--torch_dtyp=x").endswith("Did you mean --torch_dtype? The same as --dtype.")
    assert "Trimtab does not know what it means" in note("verl", f"{A}rollout.foo=1")


@pytest.mark.parametrize(
    ("slip", "name"),
    [
        (f"{A}rollout.val_kwargs.temprature", f"{A}rollout.val_kwargs.temperature"),
        ("reward.custom_reward_function.pth", "reward.custom_reward_function.path"),
        (f"{A}actor.fsdp_config.optimzer_offload", f"{A}actor.fsdp_config.optimizer_offload"),
        (f"{A}actor.optim.lr_warmup_step", f"{A}actor.optim.lr_warmup_steps"),
        ("critic.modl.path", "critic.model.path"),
    ],
)
def test_a_slip_inside_a_family_is_no_key_of_it(slip: str, name: str) -> None:
    assert f"Did you mean {name}?" in note("verl", f"{slip}=1")


@pytest.mark.parametrize("name", [f"{family}.{name}" for family, names in REAL for name in names.split()])
def test_a_real_key_inside_a_family_stays_one(name: str) -> None:
    line = convert("verl", words=[f"{name.replace('A.', A)}=1"]).lines[0].as_dict()
    assert "known here" not in line["note"] and line["outcome"] in ("automatic", "unsupported")


def test_families_of_keys_are_known_by_their_beginning() -> None:
    parallel = [f"{A}actor.megatron.tensor_model_parallel_size=4", f"{A}actor.megatron.param_offload=True"]
    found = convert("verl", words=[*parallel, "critic.foo=1", "critic.bar=null"])
    assert [line.outcome for line in found.lines] == ["automatic", "automatic", "unsupported", "dead"]
    assert "so it has no effect" in found.lines[3].as_dict()["note"]
