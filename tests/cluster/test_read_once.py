"""A model is read from disk by one rank of a host, whatever it is read for, and all ranks have its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.forked_ranks import this_rank
from trimtab.base.errors import TrimtabError
from trimtab.run import build, models

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file with a line for each model that a rank reads: the rank's number."""
    file = tmp_path / "reads"
    for module in (build, models):
        load = module.load_model

        def noted(*given: Any, load: Any = load) -> Any:
            with file.open("a") as lines:
                lines.write(f"{this_rank()}\n")
            return load(*given)

        monkeypatch.setattr(module, "load_model", noted)
    return file


CASES = {
    "none": ({"shard": "none"}, {}, None, 1),
    "gradients, reference and critic": (
        {"shard": "gradients"},
        {"algorithm": "ppo", "kl": {"coef": 0.1}},
        None,
        3,
    ),
    "full, reference": ({"shard": "full"}, {"kl": {"coef": 0.1}}, None, 2),
    "full, adapters": ({"shard": "full"}, {"kl": {"coef": 0.1}}, {"r": 4}, 1),
}


QUICK = ("gradients, reference and critic", "full, reference")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in CASES]
)
def test_one_rank_reads_and_all_train_what_one_device_does(name: str, run, reads: Path, model_folder: Path) -> None:
    keys, learn, lora, models_read = CASES[name]
    model = {"path": str(model_folder)} | ({} if lora is None else {"lora": lora})
    learn = {"steps": 1, **learn}
    found = run("two", model=model, learn=learn, run=keys)
    assert reads.read_text().split() == ["0"] * models_read
    alone = run("alone", model=model, learn=learn, run={"devices": 1, "shard": "auto"})
    assert found.metrics[0]["reward/mean"] == alone.metrics[0]["reward/mean"]
    assert found.metrics[0]["policy/grad_norm"] == pytest.approx(alone.metrics[0]["policy/grad_norm"], rel=1e-4)


@pytest.mark.parametrize("shard", [pytest.param("optimizer", marks=pytest.mark.slow), "full"])
def test_weights_that_cannot_be_read_are_one_error(shard: str, run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise TrimtabError("model.path: the file is damaged")

    monkeypatch.setattr(build, "load_model", broken)
    with pytest.raises(TrimtabError, match="the file is damaged"):
        run(run={"shard": shard})
