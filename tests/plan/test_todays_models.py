"""Plans for models of today by the values of their own configs (tests/plan/configs), on cards of 24 to 141 GB."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from trimtab.base.errors import ConfigError
from trimtab.base.units import GIB
from trimtab.config.run import Run
from trimtab.model.sizes import FUSED_FAMILIES
from trimtab.plan.devices import of_size
from trimtab.plan.job import Job, Machine
from trimtab.plan.planner import make_plan
from trimtab.plan.reading import READING, WIDENING, refuse_reading
from trimtab.plan.source import stored_as
from trimtab.run.shapes import shape_of

CONFIGS = Path(__file__).parent / "configs"
PUBLISHED = {
    "gemma-3-27b": 27.009,
    "gemma-4-31b": 30.7,
    "gpt-oss-20b": 20.91,
    "gpt-oss-120b": 116.83,
    "qwen3-vl-8b": 8.191,
    "olmo-3-7b": 7.298,
    "olmo-3-32b": 32.234,
    "glm-4-9b": 9.400,
    "smollm3-3b": 3.075,
}
"""Billions of parameters, of the text part alone."""
FITS = {
    "gemma-3-27b": (80, 141),
    "gemma-4-31b": (80, 141),
    "gpt-oss-20b": (80, 141),
    "gpt-oss-120b": (),
    "qwen3-vl-8b": (24, 48, 80, 141),
    "olmo-3-7b": (24, 48, 80, 141),
    "olmo-3-32b": (80, 141),
    "glm-4-9b": (24, 48, 80, 141),
    "smollm3-3b": (24, 48, 80, 141),
}
"""Sizes of cards, in GB, on which adapters on attention train in bfloat16."""


def folder_of(name: str, folder: Path) -> str:
    shutil.copyfile(CONFIGS / f"{name}.json", folder / "config.json")
    return str(folder)


def job_of(path: str) -> Job:
    model = shape_of(path)
    return Job(
        model, itemsize=2, prompts=16, samples=8, longest_prompt=512, typical_prompt=512, completion=1024, rank=16,
        adapters=model.lora_parameters(16, ["q_proj", "o_proj"]), fused=model.kind in FUSED_FAMILIES, stored=stored_as(path),
    )  # fmt: skip


def machine(gigabytes: int, host: int = 400) -> Machine:
    return Machine(of_size(int(gigabytes * 0.995e9)), 1, host * GIB, 16)


QUICK = ("smollm3-3b", "gpt-oss-20b")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PUBLISHED])
def test_plans_of_real_configs(name: str, tmp_path: Path) -> None:
    job = job_of(folder_of(name, tmp_path))
    assert job.shape.parameters == pytest.approx(PUBLISHED[name] * 1e9, rel=5e-3)
    for size in (24, 48, 80, 141):
        plan = make_plan(Run(), job, machine(size))
        assert plan.fits == (size in FITS[name]), (name, size, plan.ledger.fullest.required_bytes / GIB)
        if plan.fits:
            assert plan.ledger["load"].host[READING] == 2 * job.shape.parameters
            assert 0 < plan.times.update < plan.times.total < 2000


def test_what_is_dequantised_is_counted_and_refused(tmp_path: Path) -> None:
    """gpt-oss-120b is stored in 61 GiB and takes 218."""
    job = job_of(folder_of("gpt-oss-120b", tmp_path))
    assert job.stored == "MXFP4"
    plan = make_plan(Run(), job, machine(300))
    assert plan.fits and plan.ledger["load"].host[WIDENING] > 0
    with pytest.raises(
        ConfigError, match=r"stored in MXFP4 and are dequantised on loading: 116\.8 billion .* the device has"
    ):
        refuse_reading(Run(), job, machine(141))
    with pytest.raises(ConfigError, match=r"take 217\.\d GiB, and the host has 128\.0 GiB"):
        refuse_reading(Run(), job, machine(300, host=128))
    refuse_reading(Run(devices=2), job, machine(141))


@pytest.mark.slow
def test_layers_are_seen_as_they_are(tmp_path: Path) -> None:
    kinds = job_of(folder_of("gemma-4-31b", tmp_path)).shape.kinds
    assert {(block.head_size, block.kv_heads, block.window, count) for block, count in kinds.items()} == {
        (256, 16, 1024, 50), (512, 4, None, 10),
    }  # fmt: skip
    (olmo, _), *_ = job_of(folder_of("olmo-3-7b", tmp_path)).shape.kinds.items()
    assert olmo.sandwich and olmo.head_norm and olmo.window == 4096
