"""What the plan counts for a micro-batch is what the update's code allocates, over random shapes."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path as File
from typing import Any

import pytest
from transformers import AutoConfig

from trimtab.plan.activations import MicroBatchSize, UpdatePath, score_peak, update_peak
from trimtab.plan.shape import read_shape

ROOT = File(__file__).parents[2]


def cases(count: int) -> list[dict[str, Any]]:
    numbers = random.Random(5)
    found = []
    for index in range(count):
        heads, hidden = numbers.choice([1, 2, 4]), numbers.choice([128, 256, 320])
        config = {
            "vocab_size": numbers.choice([512, 2048, 8192]), "hidden_size": hidden,
            "num_hidden_layers": numbers.choice([2, 5, 12]), "num_key_value_heads": heads,
            "intermediate_size": numbers.choice([1, 3, 5]) * hidden,
            "num_attention_heads": heads * numbers.choice([1, 2, 4]), "head_dim": numbers.choice([16, 32]),
            "max_position_embeddings": 4096, "tie_word_embeddings": numbers.random() < 0.5,
        }  # fmt: skip
        groups = numbers.choice(
            [[(64, [448])] * 2, [(64, [100] * 8)], [(512, [32] * 16)], [(30, [200, 9, 77, 150])] * 2]
        )
        found.append(
            {
                "kind": ["llama", "qwen2", "qwen3", "gemma2"][index % 4],
                "config": config,
                "groups": groups,
                "kept": [False, "some", True][index % 3],
                "chunk": numbers.choice([64, 256, 1024]),
            }
        )
    return found


def test_the_count_is_what_the_code_allocates() -> None:
    work = cases(24) + mixtures(12)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.dry_update"], input=json.dumps(work), capture_output=True, text=True,
        env=environment, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for case, seen in zip(work, json.loads(done.stdout.splitlines()[-1]), strict=True):
        shape = read_shape(AutoConfig.for_model(case["kind"], **case["config"]).to_dict())
        row = MicroBatchSize(seen["tokens"], seen["predicted"], seen["seen"], seen["segments"])
        counted = sum(update_peak(shape, row, UpdatePath(2, True, case["kept"], case["chunk"], True)).values())
        band = 1.12 if shape.has_experts else 1.02  # how the router computes differs between families
        assert 0.999 < counted / seen["peak"] < band, (case, seen, counted)


def test_the_count_of_a_shared_row_is_what_each_rank_allocates() -> None:
    """Never less than a rank allocates; and little more, where attention is a small part of the whole."""
    work = cases(12)
    for index, case in enumerate(work):
        ranks = [2, 4, 3][index % 3]
        case["sharing"] = [index % ranks, ranks]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.plan.dry_update"], input=json.dumps(work), capture_output=True, text=True,
        env=environment, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for case, seen in zip(work, json.loads(done.stdout.splitlines()[-1]), strict=True):
        shape = read_shape(AutoConfig.for_model(case["kind"], **case["config"]).to_dict())
        path = UpdatePath(2, True, case["kept"], case["chunk"], True)
        row = replace(MicroBatchSize(*seen["sizes"]), pairs=0)  # what stands in for attention has no scores
        counted = sum(update_peak(shape, row, path).values())
        assert 0.99 < counted / seen["peak"] < 1.35, (case, seen, counted)


def mixtures(count: int) -> list[dict[str, Any]]:
    numbers = random.Random(6)
    for index, case in enumerate(found := cases(count)):
        case["kind"] = ["qwen3_moe", "mixtral"][index % 2]
        case["kept"] = [False, "some", True][index % 3]
        experts = {
            "num_experts": numbers.choice([16, 64]),
            "moe_intermediate_size": numbers.choice([64, 192]),
            "decoder_sparse_step": 1,
        }
        if index % 2:
            experts = {"num_local_experts": 8, "intermediate_size": numbers.choice([64, 192])}
        case["config"] |= experts | {"num_experts_per_tok": numbers.choice([2, 4])}
    return found


def test_rows_of_groups_are_what_is_packed() -> None:
    """64 prompt tokens, eight samples of 100, whose last is only predicted; each sees the prompt."""
    assert MicroBatchSize.of_groups(1, 64, 8, 100) == MicroBatchSize(
        64 + 8 * 99, 800, 64 + 8 * 163, 9, 64 * 64 + 8 * 99 * 163
    )
    assert MicroBatchSize.of_groups(2, 64, 1, 100) == MicroBatchSize(
        2 * 163, 200, 2 * (64 + 163), 4, 2 * (64 * 64 + 99 * 163)
    )


@pytest.mark.parametrize("fused", [True, False])
def test_more_is_kept_for_less_recomputing(fused: bool) -> None:
    shape = read_shape({"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
                        "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936})  # fmt: skip
    row = MicroBatchSize(16384, 14000, 16384, 40)
    sizes = [
        sum(update_peak(shape, row, UpdatePath(2, fused, kept, 2048, True)).values()) for kept in (False, "some", True)
    ]
    assert sizes[0] > sizes[1] >= sizes[2]
    scored = sum(score_peak(shape, row, UpdatePath(2, fused, False, 2048, True)).values())
    assert scored < sizes[2]
