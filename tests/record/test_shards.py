"""State that any number of ranks wrote is read by any number of them, in any stretch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import tiny_model

from tests.record.format1 import write_as_format_1
from trimtab.base.errors import TrainingError
from trimtab.config.learn import Learn
from trimtab.model.folder import other_files
from trimtab.model.sizes import BLOCK
from trimtab.model.weights import WeightStore, round_up
from trimtab.record.checkpoint import RunState, load_optimizer, load_part, load_state
from trimtab.record.part import PartWritten, collect, write_part
from trimtab.record.saving import PendingCheckpoint
from trimtab.record.shards import StateReader
from trimtab.update.optimizer import MasterAdamW

FILE = "optimizer.safetensors"


def optimizer_of(model: torch.nn.Module, eight_bit: bool, seed: int = 1) -> MasterAdamW:
    learn = Learn.model_validate({"lr": 1e-2, "optimizer": {"states": "8bit" if eight_bit else "full"}})
    optimizer = MasterAdamW(WeightStore(model.named_parameters()), learn)
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        (parameter * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)).sum().backward()
    optimizer.step(1e-2)
    return optimizer


class RankOptimizer:
    """What a rank of several holds: of each unit a stretch of blocks, which may be none."""

    def __init__(self, whole: MasterAdamW, rank: int, ranks: int) -> None:
        self.weights, self.params, self._whole = whole.weights, whole.params, whole
        self._rank, self._ranks = rank, ranks

    def _stretch(self, unit: str) -> tuple[int, int]:
        tensors = self._whole.state_tensors()
        size = next(t.numel() for name, t in tensors.items() if name.endswith(f"/{unit}") and _is_flat(name))
        each = round_up(-(-size // self._ranks), BLOCK)
        return each * self._rank, max(0, min(size, each * (self._rank + 1)) - each * self._rank)

    def state_tensors(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, tensor in self._whole.state_tensors().items():
            kind, _, unit = name.partition("/")
            first, count = self._stretch(unit)
            scale = BLOCK if kind.endswith("_scales") else 1
            found[name] = tensor if kind == "step" else tensor[first // scale : (first + count) // scale]
        return found

    def table(self) -> Any:
        return self._whole.table()

    def stretches(self) -> dict[str, tuple[int, int]]:
        return {unit.name: self._stretch(unit.name) for unit in self.weights.units}

    def load_state_tensors(self, tensors: Any, table: Any) -> None:
        raise NotImplementedError


def _is_flat(name: str) -> bool:
    return not name.startswith("step/") and not name.partition("/")[0].endswith("_scales")


def save(run: Path, model: Any, optimizer: MasterAdamW, tokenizer: Any, ranks: int, **others: Any) -> Path:
    run.mkdir(exist_ok=True)
    pending, parts = PendingCheckpoint(run, RunState(step=1), 2), list[PartWritten]()
    aside = pending.open()
    for rank in range(ranks):
        own = RankOptimizer(optimizer, rank, ranks) if ranks > 1 else optimizer
        files = other_files(model, tokenizer) if rank == 0 else None
        part = collect(model, own, others.get("others"), files, rank, ranks)
        parts.append(write_part(aside, part))
    return pending.finish(parts)


@pytest.fixture(params=[(torch.float32, False), (torch.bfloat16, False), (torch.float32, True), (torch.bfloat16, True)])
def saved(request: pytest.FixtureRequest, tmp_path: Path, tokenizer: Any) -> tuple[Any, MasterAdamW, Path]:
    """A model, its optimizer, and a folder with what 1, 2 and 4 ranks have saved of them."""
    dtype, eight_bit = request.param
    model = tiny_model(dtype=dtype)
    optimizer = optimizer_of(model, eight_bit)
    for ranks in (1, 2, 4):
        save(tmp_path / str(ranks), model, optimizer, tokenizer, ranks)
    return model, optimizer, tmp_path


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_one_process_reads_what_any_number_wrote(saved: tuple[Any, MasterAdamW, Path], ranks: int) -> None:
    model, optimizer, folder = saved
    checkpoint = folder / str(ranks) / "checkpoints/step-1"
    assert load_state(checkpoint).step == 1
    names = {path.name for path in checkpoint.glob("optimizer*")}
    assert names == (
        {FILE} if ranks == 1 else {f"optimizer-0000{r + 1}-of-0000{ranks}.safetensors" for r in range(ranks)}
    )
    again = optimizer_of(tiny_model(dtype=model.dtype), optimizer.eight_bit, seed=2)
    load_optimizer(checkpoint, again)
    for name, tensor in optimizer.state_tensors().items():
        assert torch.equal(again.state_tensors()[name], tensor), name


@pytest.mark.parametrize("wrote", [1, 2, 4])
@pytest.mark.parametrize("reads", [1, 2, 4])
def test_ranks_fill_their_own_stretches(saved: tuple[Any, MasterAdamW, Path], wrote: int, reads: int) -> None:
    _, optimizer, folder = saved
    table = optimizer.table()
    with StateReader(folder / str(wrote) / "checkpoints/step-1", FILE) as reader:
        for rank in range(reads):
            own = RankOptimizer(optimizer, rank, reads)
            for name, expected in own.state_tensors().items():
                kind, _, unit = name.partition("/")
                if kind == "step":
                    assert [reader.step(place.name) for place in reader.places(unit)] == list(expected)
                    continue
                out = torch.zeros_like(expected)
                reader.fill(out, kind, [place for place in table if place.unit == unit], own.stretches()[unit][0])
                assert torch.equal(out, expected), (name, rank)


def test_any_stretch_of_a_parameter_is_read(saved: tuple[Any, MasterAdamW, Path]) -> None:
    _, optimizer, folder = saved
    kind = "exp_avg_codes" if optimizer.eight_bit else "exp_avg"
    with (
        StateReader(folder / "1/checkpoints/step-1", FILE) as one,
        StateReader(folder / "4/checkpoints/step-1", FILE) as four,
    ):
        for place in optimizer.table():
            count = torch.Size(place.shape).numel()
            whole = one.read(kind, place.name, 0, count)
            for begin, end in ((0, 1), (count // 3, count // 2 + 1), (count - 1, count)):
                assert torch.equal(four.read(kind, place.name, begin, end), whole[begin:end]), place


def test_the_model_is_a_hugging_face_folder_whoever_wrote_it(saved: tuple[Any, MasterAdamW, Path]) -> None:
    from transformers import AutoModelForCausalLM

    model, _, folder = saved
    for ranks in (1, 2, 4):
        checkpoint = folder / str(ranks) / "checkpoints/step-1"
        assert (checkpoint / "model.safetensors").exists() == (ranks == 1)
        loaded = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=model.dtype)
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), loaded.parameters())), ranks
        sizes = [path.stat().st_size for path in checkpoint.glob("model*.safetensors")]
        assert len(sizes) == ranks and max(sizes) < 4 * min(sizes), "units are dealt in about equal shares"


def test_files_of_whole_tensors_are_dealt_and_read_together(tmp_path: Path, tokenizer: Any) -> None:
    """A critic's weights, which every rank has."""
    model = tiny_model()
    tensors = {f"layer.{number}": torch.randn(number + 1) for number in range(7)}
    optimizer = optimizer_of(model, False)
    folder = save(tmp_path / "run", model, optimizer, tokenizer, 3, others={"critic.safetensors": tensors})
    assert len(list(folder.glob("critic-*"))) == 3 and not (folder / "critic.safetensors").exists()
    found = load_part(folder / "critic.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_state_is_read_into_other_units_and_layouts(tmp_path: Path, tokenizer: Any) -> None:
    """A reader's table is its own: another number of ranks rounds units otherwise, and a parameter may be turned in memory."""
    from dataclasses import replace

    model = tiny_model()
    optimizer = optimizer_of(model, False)
    checkpoint = save(tmp_path / "run", model, optimizer, tokenizer, 4)
    place = next(place for place in optimizer.table() if len(place.shape) == 2)
    rows, columns = place.shape
    turned = replace(place, unit="another", offset=512, stride=(1, rows))
    with StateReader(checkpoint, FILE) as reader:
        out = torch.full((rows * columns + 612,), -1.0)
        reader.fill(out, "exp_avg", [turned])
        expected = reader.tensor("exp_avg", place.name)
    assert torch.equal(out[512 : 512 + rows * columns].view(columns, rows).T, expected)
    assert out[:512].eq(-1).all() and out[512 + rows * columns :].eq(-1).all()


def test_format_1_is_read_in_stretches_too(tmp_path: Path, tokenizer: Any) -> None:
    model = tiny_model()
    optimizer = optimizer_of(model, False)
    checkpoint = save(tmp_path / "run", model, optimizer, tokenizer, 1)
    place = optimizer.table()[0]
    with StateReader(checkpoint, FILE) as reader:
        expected = reader.tensor("exp_avg", place.name)
    write_as_format_1(checkpoint)
    with StateReader(checkpoint, FILE) as reader:
        assert reader.table is None
        out = torch.zeros(100)
        reader.fill(out, "exp_avg", [place], place.offset + 7)
        assert torch.equal(out, expected.flatten()[7:107])
        assert reader.step(place.name) == 1


def test_format_2_is_read(tmp_path: Path, tokenizer: Any) -> None:
    """It is format 3 of one rank under another number."""
    from trimtab.record.checkpoint import write_state

    model = tiny_model()
    optimizer = optimizer_of(model, False)
    checkpoint = save(tmp_path / "run", model, optimizer, tokenizer, 1)
    state = json.loads((checkpoint / "state.json").read_text())
    write_state(checkpoint, load_state(checkpoint), {"format": 2, "files": state["files"], "tables": state["tables"]})
    again = optimizer_of(tiny_model(), False, seed=2)
    assert load_state(checkpoint).step == 1
    load_optimizer(checkpoint, again)
    assert all(torch.equal(again.state_tensors()[name], t) for name, t in optimizer.state_tensors().items())


def swap(folder: Path, one: str, two: str) -> None:
    (folder / one).rename(folder / "aside")
    (folder / two).rename(folder / one)
    (folder / "aside").rename(folder / two)


def test_shares_that_are_swapped_damaged_or_missing_are_named(tmp_path: Path, tokenizer: Any) -> None:
    model = tiny_model()
    whole = save(tmp_path / "run", model, optimizer_of(model, False), tokenizer, 4)
    one, two = (f"optimizer-0000{number}-of-00004.safetensors" for number in (1, 2))
    shutil.copytree(whole, tmp_path / "kept")

    def told(words: str) -> None:
        with pytest.raises(TrainingError, match=words):
            load_state(whole)
        shutil.rmtree(whole)
        shutil.copytree(tmp_path / "kept", whole)

    swap(whole, one, two)
    told(rf"{one} has the contents of {two}; {two} has the contents of {one}")
    (whole / two).unlink()
    told(rf"{two} is missing")
    with (whole / one).open("r+b") as file:
        file.seek(-4, 2)
        file.write(b"\1\2\3\4")
    told(rf"{one} was changed or damaged")
    (whole / "model.safetensors.index.json").write_text("{}")
    told(r"model\.safetensors\.index\.json has")
    load_state(whole)


def test_a_part_of_another_size_than_was_told_ends_the_save(tmp_path: Path, tokenizer: Any) -> None:
    """As where ranks have no disk in common."""
    model = tiny_model()
    run = tmp_path / "run"
    run.mkdir()
    pending = PendingCheckpoint(run, RunState(step=1), 2)
    part = write_part(pending.open(), collect(model, optimizer_of(model, False), None, {}))
    (run / "checkpoints/.writing-step-1/optimizer.safetensors").write_bytes(b"short")
    with pytest.raises(TrainingError, match="cannot save step 1"), pending.explaining():
        pending.finish([part])
    assert list((run / "checkpoints").iterdir()) == []


def test_elements_that_no_file_holds_are_told(tmp_path: Path, tokenizer: Any) -> None:
    model = tiny_model()
    checkpoint = save(tmp_path / "run", model, optimizer_of(model, False), tokenizer, 2)
    state = json.loads((checkpoint / "state.json").read_text())
    del state["shards"][FILE]["optimizer-00002-of-00002.safetensors"]
    with StateReader(checkpoint, FILE, state) as reader, pytest.raises(ValueError, match=r"no file holds elements"):
        dict(reader.by_parameter())


def test_a_share_holds_no_more_than_its_stretch(saved: tuple[Any, MasterAdamW, Path]) -> None:
    folder = saved[2]
    state = json.loads((folder / "4/checkpoints/step-1/state.json").read_text())
    for file, stretches in state["shards"][FILE].items():
        for name, tensor in load_file(folder / "4/checkpoints/step-1" / file).items():
            kind, _, unit = name.partition("/")
            if kind != "step":
                assert tensor.numel() == stretches[unit][1] // (BLOCK if kind.endswith("_scales") else 1)
