"""Every parameter of every model has a place in the store, and keeps its values there."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny import tiny_model, tiny_tokenizer
from transformers.pytorch_utils import Conv1D

from trimtab.base.errors import ModelError
from trimtab.model.load import save_model
from trimtab.model.sizes import BLOCK
from trimtab.model.transfer import host_state
from trimtab.model.weights import ADAPTERS, VECTORS, WeightStore


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def check(store: WeightStore) -> None:
    """What holds for any store."""
    seen: set[str] = set()
    for unit in store.units:
        assert unit.size % BLOCK == 0 and store.flats[unit.name].shape == (unit.size,)
        end = 0
        for entry in sorted(unit.entries, key=lambda entry: entry.offset):
            assert entry.offset >= end and entry.name not in seen
            end, parameter = entry.end, store.parameters[entry.name]
            seen.add(entry.name)
            assert parameter.untyped_storage().data_ptr() == store.flats[unit.name].untyped_storage().data_ptr()
            assert torch.equal(entry.view(store.flats[unit.name]), parameter) and parameter.dtype == unit.dtype
        assert end <= unit.size
    assert seen == set(store.parameters)


@pytest.mark.parametrize(
    "kind", ["qwen2", "llama", "gpt2", "gpt_neox", "phi3", "gemma2", "mixtral", "qwen3_moe", "gpt_oss"]
)
def test_a_model_computes_what_it_did(kind: str) -> None:
    """Fused and separate projections, transposed ones (Conv1D), stacks of experts, tied heads."""
    model = tiny_model(kind)
    before, tokens = values(model), torch.arange(6)[None]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    store = WeightStore(model.named_parameters())
    check(store)
    assert store.is_of(model) and set(store.parameters) == {name for name, _ in model.named_parameters()}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, expected)


def test_a_layer_is_a_unit_with_its_joined_projections_side_by_side() -> None:
    model = tiny_model("qwen2", num_hidden_layers=2, tie_word_embeddings=False)
    store = WeightStore(model.named_parameters())
    assert [unit.name for unit in store.units] == [
        "model.embed_tokens",
        "model.layers.0",
        VECTORS,
        "model.layers.1",
        "lm_head",
    ]
    attention, mlp = model.model.layers[1].self_attn, model.model.layers[1].mlp
    for group in ([attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj]):
        for kind in ("weight", "bias"):
            parts = [getattr(linear, kind) for linear in group]
            if parts[0] is not None:
                joined = store.joined(parts)
                assert joined is not None and torch.equal(joined, torch.cat(parts))
                with torch.no_grad():
                    parts[-1] += 1.0
                assert torch.equal(joined, torch.cat(parts)), "a view, not a copy"
    assert store.joined([attention.q_proj.weight, attention.o_proj.weight]) is None


def test_projections_are_joined_under_adapters_which_are_a_unit_of_their_own() -> None:
    settings = LoraConfig(r=2, target_modules="all-linear")
    model = get_peft_model(tiny_model("llama", dtype=torch.bfloat16), settings)
    store = WeightStore(model.named_parameters())
    check(store)
    attention = model.get_base_model().model.layers[0].self_attn
    assert store.joined([getattr(attention, f"{n}_proj").base_layer.weight for n in "qkv"]) is not None
    (adapters,) = (unit for unit in store.units if unit.name == ADAPTERS)
    assert {entry.name for entry in adapters.entries} == {n for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_any_number_of_ranks_cuts_a_unit_evenly_between_blocks(ranks: int) -> None:
    store = WeightStore(tiny_model("qwen2").named_parameters(), ranks)
    check(store)
    assert all(unit.size % (ranks * BLOCK) == 0 for unit in store.units)
    plain = WeightStore(tiny_model("qwen2").named_parameters())
    assert [unit.entries for unit in store.units] == [unit.entries for unit in plain.units], "only the end differs"


def test_what_lies_in_its_place_is_not_moved_and_what_is_elsewhere_is_seen() -> None:
    model = tiny_model("llama")
    store = WeightStore(model.named_parameters())
    again = WeightStore(model.named_parameters())
    assert all(again.flats[name].data_ptr() == flat.data_ptr() for name, flat in store.flats.items())
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.clone()
    assert not store.is_of(model)
    moved = WeightStore(model.named_parameters())
    kept = [name for name, flat in store.flats.items() if moved.flats[name].data_ptr() == flat.data_ptr()]
    assert set(store.flats) - set(kept) == {"model.layers.0"}
    model.value_head = torch.nn.Linear(4, 1)
    assert not moved.is_of(model)


def test_values_exist_twice_for_one_unit_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", num_hidden_layers=4)
    alive: list[int] = []
    put = WeightStore.put

    def seen(self: WeightStore, unit, flat) -> None:
        put(self, unit, flat)
        storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in model.parameters()}
        alive.append(sum(storages.values()))

    monkeypatch.setattr(WeightStore, "put", seen)
    before = sum(p.nbytes for p in model.parameters())
    store = WeightStore(model.named_parameters())
    padding = sum(flat.nbytes for flat in store.flats.values()) - before
    assert len(alive) == len(store.units) == 7 and max(alive) <= before + padding


def test_parameters_that_share_memory_without_being_one_go_on_sharing_it() -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(8, 8, bias=False), "b": torch.nn.Linear(8, 8, bias=False)})
    model["b"].weight.data = model["a"].weight.data
    store = WeightStore(model.named_parameters())
    with torch.no_grad():
        model["a"].weight.fill_(3.0)
    assert torch.equal(model["b"].weight, model["a"].weight) and store.is_of(model)
    flat = torch.zeros_like(store.flats["a"])
    store.put(store.units[0], flat)
    assert not model["b"].weight.any()


def test_odd_sizes_types_and_shapes_have_a_place() -> None:
    model = torch.nn.Module()
    model.scalar = torch.nn.Parameter(torch.tensor(2.0))
    model.empty = torch.nn.Parameter(torch.zeros(0, 3))
    model.stack = torch.nn.Parameter(torch.randn(3, 5, 7))
    model.spread = torch.nn.Parameter(torch.randn(6, 10)[:, ::2])
    model.conv = Conv1D(5, 3)
    model.double = torch.nn.Linear(3, 3, dtype=torch.float64)
    model.layers = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 3, dtype=torch.bfloat16)])
    model.layers[0].extra = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    model.layers[0].frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    before = values(model)
    store = WeightStore(model.named_parameters())
    check(store)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    names = [unit.name for unit in store.units if unit.name.startswith("layers.0")]
    assert names == ["layers.0", "layers.0:bfloat16:cpu:trained", "layers.0:float32:cpu:frozen"]
    assert not any(
        len({store.parameters[entry.name].requires_grad for entry in unit.entries}) > 1 for unit in store.units
    )


def test_projections_whose_sizes_are_no_whole_blocks_are_not_joined() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(3, 5, bias=False) for name in ("gate_proj", "up_proj")})
    store = WeightStore(model.named_parameters())
    check(store)
    assert store.joined([model["gate_proj"].weight, model["up_proj"].weight]) is None


def test_quantised_weights_stay_where_they_are_and_are_not_trained() -> None:
    model = torch.nn.Linear(4, 4)
    model.packed = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    at = model.packed.data_ptr()
    store = WeightStore(model.named_parameters())
    assert model.packed not in store and model.packed.data_ptr() == at and store.is_of(model)

    class Wrapped(torch.Tensor):
        pass

    model.other = torch.nn.Parameter(torch.zeros(2, 2).as_subclass(Wrapped))
    with pytest.raises(
        ModelError, match=r"other is a Wrapped of torch\.float32, which cannot be trained\. Freeze it, or"
    ):
        WeightStore(model.named_parameters())


def test_a_copy_of_a_model_has_memory_of_its_own() -> None:
    model = tiny_model("llama")
    WeightStore(model.named_parameters())
    twin = copy.deepcopy(model)
    before = values(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    check(WeightStore(twin.named_parameters()))


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_is_saved_as_before_and_without_a_copy(tied: bool, tmp_path: Path) -> None:
    model = tiny_model("qwen2", dtype=torch.bfloat16, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / "before")
    WeightStore(model.named_parameters())
    state = host_state(model)
    for name, value in model.state_dict().items():
        assert state[name].data_ptr() == value.data_ptr() and torch.equal(state[name], value), name
        assert state[name].untyped_storage().nbytes() == value.nbytes, "a storage of its own"
    assert (state["lm_head.weight"] is state["model.embed_tokens.weight"]) == tied
    save_model(model, tiny_tokenizer(), tmp_path / "after")
    before, after = ((tmp_path / side / "model.safetensors").read_bytes() for side in ("before", "after"))
    assert before == after


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_is_not_joined_begins_on_a_block_and_any_number_of_ranks_cuts_a_unit_evenly(ranks: int) -> None:
    """Sizes that are no multiples of a block: 8-bit state must not share a block between parameters."""
    named = [(f"layers.0.{name}.weight", torch.nn.Parameter(torch.randn(7, 5))) for name in ("a", "b", "c")]
    values = [parameter.detach().clone() for _, parameter in named]
    store = WeightStore(named, ranks)
    (unit,) = store.units
    assert [entry.offset for entry in unit.entries] == [0, BLOCK, 2 * BLOCK]
    assert unit.size % (BLOCK * ranks) == 0 and unit.size >= 2 * BLOCK + 35
    assert all(torch.equal(parameter, value) for (_, parameter), value in zip(named, values))
