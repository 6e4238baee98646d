"""Flags about devices say which key they are now, and what to write to keep their value."""

from __future__ import annotations

import pytest

from trimtab.convert import convert

CASES = [
    ("openrlhf", "--zero_stage 0", "run.shard", "write run.shard: none to keep it"),
    ("openrlhf", "--ds.zero_stage 1", "run.shard", "write run.shard: optimizer to keep it"),
    ("openrlhf", "--zero_stage 2", "run.shard", "write run.shard: gradients to keep it"),
    ("openrlhf", "--zero_stage 3", "run.shard", "run.shard: full"),
    ("openrlhf", "--actor_num_gpus_per_node 8", "run.devices", "write run.devices: 8 to keep that number"),
    ("openrlhf", "--actor_num_nodes 6", "run.devices", "start ray on the 6 machines, and write run.cluster"),
    ("openrlhf", "--zpg 4", "run.shard_devices", "write run.shard_devices: 4 to keep that number"),
    ("verl", "trainer.n_gpus_per_node=8", "run.devices", "write run.devices: 8 to keep that number"),
    ("verl", "trainer.nnodes=2", "run.devices", "start ray on the 2 machines, and write run.cluster"),
    ("verl", "actor_rollout_ref.actor.fsdp_config.fsdp_size=4", "run.shard_devices", "run.shard_devices: 4"),
    ("verl", "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=False", "run.shard", "run.shard: gradients"),
    ("verl", "actor_rollout_ref.actor.fsdp_config.reshard_after_forward=True", "run.shard", "run.shard: full"),
    ("trl", "--deepspeed ds_config_zero2.json", "run.shard", "write run.shard: gradients to keep it"),
    ("trl", "--fsdp shard_grad_op", "run.shard", "write run.shard: gradients to keep it"),
    ("trl", "--fsdp 'full_shard auto_wrap'", "run.shard", "run.shard: full"),
    ("trl", "--num_processes 4", "run.devices", "write run.devices: 4 to keep that number"),
    ("nanochat", "--num_gpus 8", "run.devices", "write run.devices: 8 to keep that number"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "flag", "key", "note"), CASES)
def test_a_flag_names_its_key_and_the_value_that_keeps_it(kind: str, flag: str, key: str, note: str) -> None:
    found = convert(kind, text=flag).as_dict()
    line = next(line for line in found["flags"] if line["key"] == key)
    assert line["outcome"] == "automatic" and note.lower() in line["note"].lower()
    assert "run" not in found["config"], "automatic: nothing is pinned unasked"


def test_no_note_speaks_of_one_device_or_one_process() -> None:
    from trimtab.convert import FRAMEWORKS

    notes = [rule.note for framework in FRAMEWORKS.values() for rule in framework.rules]
    assert not [note for note in notes if "one device" in note or "one process on" in note]


def test_a_launchers_processes_are_devices() -> None:
    text = "torchrun --nnodes 2 --nproc_per_node 8 -m scripts.chat_rl -- --num_samples 8"
    lines = {line["flag"]: line for line in convert("nanochat", text=text).as_dict()["flags"]}
    assert lines["--nproc_per_node"]["key"] == "run.devices"
    assert (
        "start ray on the 2 machines, and write run.cluster: the address of its head"
        in lines["--nnodes"]["note"].lower()
    )
