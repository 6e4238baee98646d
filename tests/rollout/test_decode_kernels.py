"""The decode kernels against plain PyTorch: attention over pages in all its variants, and whole fused layers.

Without a CUDA device they run in Triton's interpreter (tests/conftest.py sets it), with one they are compiled.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from tiny import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

triton = pytest.importorskip("triton", reason="Triton is not installed")

from trimtab.config.learn import Sampling  # noqa: E402
from trimtab.model.attention import Rules, causal_window, dense_attention  # noqa: E402
from trimtab.model.packed import PackedPlan  # noqa: E402
from trimtab.model.parts import SILU, Adapter, Linears, Unfusable, Watch  # noqa: E402
from trimtab.model.policy import Policy  # noqa: E402
from trimtab.model.shapes import layer_shapes  # noqa: E402
from trimtab.model.sizes import FUSED_FAMILIES  # noqa: E402
from trimtab.model.weights import WeightStore  # noqa: E402
from trimtab.rollout.native import cuda  # noqa: E402
from trimtab.rollout.native.arena import Arena  # noqa: E402
from trimtab.rollout.native.cache import KVCache, PrefillPlan, PrefillSegment  # noqa: E402
from trimtab.rollout.native.fused import FusedBody, Product  # noqa: E402
from trimtab.rollout.native.kernels import attention as kernels  # noqa: E402
from trimtab.rollout.native.kernels import skinny as streaming  # noqa: E402
from trimtab.rollout.native.kernels.attention import DecodeBatch, DecodeShape, Partials, decode_attention  # noqa: E402
from trimtab.rollout.native.kernels.skinny import Cut, cut_for, serves, skinny  # noqa: E402
from trimtab.rollout.native.rows import Rows  # noqa: E402

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""The interpreter has no bfloat16 products."""


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def empty(shape, dtype) -> torch.Tensor:
    """Memory nobody wrote to, at its worst."""
    return torch.full(tuple(shape), float("nan"), dtype=dtype, device=DEVICE)


def paged(lengths: list[int], shape: DecodeShape, page: int, shared_pages: int = 0) -> tuple[torch.Tensor, ...]:
    """Keys and values of sequences, [B][S, K, D], and the same in pages (the first `shared_pages` in common)."""
    width = max(lengths) // page + 1
    total = shared_pages + len(lengths) * width
    keys = numbers(total, page, shape.kv_heads, shape.size, seed=1)
    values = numbers(total, page, shape.kv_heads, shape.value_size, seed=2)
    order = torch.randperm(total, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    tables = torch.zeros(len(lengths) + 1, width, dtype=torch.int64, device=DEVICE)
    for i in range(len(lengths)):
        own = order[shared_pages + i * width : shared_pages + (i + 1) * width]
        tables[i] = torch.cat((order[:shared_pages], own))[:width]
    return keys, values, tables


def reference(q, k_new, v_new, keys, values, table, length: int, rules: Rules) -> torch.Tensor:
    """Dense attention of one sequence's new token, in float64."""
    k = torch.cat((keys[table].flatten(0, 1)[:length], k_new[None])).double()
    v = torch.cat((values[table].flatten(0, 1)[:length], v_new[None])).double()
    at = torch.arange(length + 1, device=DEVICE)
    allowed = causal_window(at[-1:], at, rules.window)
    rows = q.double()[None, :, None], k.transpose(0, 1)[None], v.transpose(0, 1)[None]
    return dense_attention(*rows, rules, allowed)[0, :, 0]


CASES = {
    "one head each": (DecodeShape(4, 4, 16, 16), Rules(0.25), 16, [5, 0, 33]),
    "seven a group": (DecodeShape(14, 2, 64, 64), Rules(0.125), 16, [40, 130, 1]),
    "one key head": (DecodeShape(5, 1, 32, 32), Rules(0.2), 4, [9, 17, 64]),
    "size 80": (DecodeShape(4, 2, 80, 80), Rules(0.11), 16, [20, 31]),
    "size 128": (DecodeShape(12, 2, 128, 128), Rules(0.09), 64, [70, 128, 64]),
    "values narrower": (DecodeShape(4, 2, 24, 16), Rules(0.2), 8, [20, 8]),
    "large pages": (DecodeShape(4, 2, 16, 16), Rules(0.25), 128, [127, 128, 200]),
    "pages of one": (DecodeShape(4, 2, 16, 16), Rules(0.25), 1, [3, 40]),
    "odd pages": (DecodeShape(4, 2, 16, 16), Rules(0.25), 11, [3, 40, 11]),
    "window": (DecodeShape(4, 2, 16, 16), Rules(0.25, window=7), 4, [3, 40, 7, 6, 8, 100]),
    "softcap": (DecodeShape(4, 2, 16, 16), Rules(0.25, softcap=1.5), 8, [3, 40]),
    "sinks": (DecodeShape(4, 2, 16, 16), Rules(0.25, sinks_H=numbers(4, seed=9)), 8, [3, 0, 40]),
    "all": (DecodeShape(6, 2, 16, 16), Rules(0.25, 21, 2.0, numbers(6, seed=9)), 8, [3, 40, 90]),
}


@pytest.mark.parametrize("splits", [1, 4], ids="{} splits".format)
@pytest.mark.parametrize("shared", [0, 2], ids="{} shared pages".format)
@pytest.mark.parametrize("case", CASES)
def test_paged_attention_equals_dense(case: str, shared: int, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, rules, page, lengths = CASES[case]
    monkeypatch.setattr(kernels, "splits_for", lambda batch, kv_heads: splits)
    lengths = [n + shared * page for n in lengths]
    count = len(lengths)
    keys, values, tables = paged(lengths, shape, page, shared)
    q, k, v = (
        numbers(count, heads, size, seed=s)
        for heads, size, s in (
            (shape.heads, shape.size, 4),
            (shape.kv_heads, shape.size, 5),
            (shape.kv_heads, shape.value_size, 6),
        )
    )
    expected = [reference(q[i], k[i], v[i], keys, values, tables[i], n, rules) for i, n in enumerate(lengths)]
    used = torch.zeros(keys.shape[:2], dtype=torch.bool, device=DEVICE)
    for i, n in enumerate(lengths):
        for t in range(n):
            used[tables[i, t // page], t % page] = True
    keys[~used], values[~used] = float("nan"), float("nan")  # what no sequence has written must not be read
    rows = torch.randperm(count, generator=torch.Generator().manual_seed(7)).to(DEVICE)
    index = torch.cat((rows, torch.tensor([count], device=DEVICE)))  # the last entry is idle
    inverse = torch.argsort(rows)
    state_tables = tables.clone()
    state_tables[:count] = tables[inverse]
    positions = torch.tensor([*lengths, 0], device=DEVICE)[torch.cat((inverse, torch.tensor([count], device=DEVICE)))]
    done = torch.zeros(count + 1, dtype=torch.int32, device=DEVICE)
    done[count] = 1
    items = torch.zeros((3, 3), dtype=torch.int64, device=DEVICE)
    shared_B = torch.zeros(count + 1, dtype=torch.int64, device=DEVICE)
    if shared:
        items[1] = torch.tensor([0, count, shared])
        shared_B[:count] = shared
    batch = DecodeBatch(index, state_tables, positions, done, shared_B, items if shared else None, page)
    partials = Partials(16, [shape], empty)
    out = empty((count + 1, shape.heads, shape.value_size), torch.float32)
    q, k, v = (torch.cat((x, x[:1])) for x in (q, k, v))
    decode_attention(batch, shape, rules, partials, q, k, v, keys, values, out)
    for i, n in enumerate(lengths):
        torch.testing.assert_close(out[i].double(), expected[i], atol=2e-5, rtol=2e-5)
        assert torch.equal(keys[tables[i, n // page], n % page], k[i])
        assert torch.equal(values[tables[i, n // page], n % page], v[i])
    assert (out[count] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 24), (3, 64, 256), (16, 33, 136), (20, 16, 512)])
def test_products_of_few_rows_equal_torch(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = (numbers(*s).to(dtype) for s in ((rows, inputs), (2 * outputs, inputs), (2 * outputs,)))
    out = empty((8 * 64 * 80,), torch.float32)
    exact = x.double() @ weight.double().t() + bias.double()
    near = {"atol": 1e-4, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    for parts in (1, 2, 4):
        found = skinny(x, weight, bias, out, Cut(16, 32, parts, 4, 2))
        torch.testing.assert_close(found.double().sum(0), exact, atol=2e-3, rtol=1e-4)
        torch.testing.assert_close(
            skinny(x, weight, None, out, Cut(16, 32, parts, 4, 2)).double().sum(0), exact - bias, **near
        )
    gate, up = exact[:, :outputs], exact[:, outputs:]
    found = skinny(x, weight, bias, out, Cut(16, 32, 1, 4, 2), SILU)[0]
    near["atol"] *= max(4.0, up.abs().max().item())  # an error of the gate is multiplied by the other factor
    torch.testing.assert_close(found.double(), torch.nn.functional.silu(gate) * up, **near)


def test_small_matrices_are_not_cut_where_nobody_adds_up() -> None:
    assert cut_for(8, 896, 4864, 2, gated=False, whole=True).parts == 1
    assert cut_for(8, 896, 4864, 2, gated=False, whole=False).parts == 8
    assert cut_for(8, 32, 32, 2, gated=False, whole=False).parts == 1


@given(
    rows=st.integers(1, 128), outputs=st.integers(1, 20000), inputs=st.integers(1, 20000), itemsize=st.sampled_from([2, 4]),
    gated=st.booleans(), whole=st.booleans(), device=st.sampled_from([(132, 227), (108, 163), (128, 99), (20, 48)]),
)  # fmt: skip
def test_a_cut_fits_the_device(rows, outputs, inputs, itemsize, gated, whole, device) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "_device", lambda: (device[0], device[1] * 1024))
        cut = cut_for(rows, outputs, inputs, itemsize, gated, whole)
    assert cut.parts == 1 or not (whole or gated)
    block = max(16, 1 << (rows - 1).bit_length())
    assert cut.stages * cut.inputs * (cut.outputs * (1 + gated) + block) * itemsize <= device[1] * 1024


@pytest.mark.parametrize(("capability", "rows"), [((8, 0), 0), ((9, 0), 128), ((10, 0), 128)])
def test_devices_without_descriptors_use_cublas(capability, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(streaming, "_device", lambda: (132, 227 * 1024))
    assert streaming.most_rows(4864) == rows
    assert streaming.most_rows(8960) == min(rows, 64)


def test_matrices_whose_rows_begin_anywhere_are_left_to_cublas() -> None:
    assert serves(torch.empty(4, 136, dtype=HALF)) and serves(torch.empty(4, 20))
    assert not serves(torch.empty(4, 130, dtype=HALF)) and not serves(torch.empty(4, 22)[:, :20])


@pytest.fixture
def _few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every program costs the interpreter a second; two parts of a sequence show what sixteen would."""
    monkeypatch.setattr(kernels, "MAX_SPLITS", 2)


FUSABLE = [
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "granite", "olmo2", "olmo3", "glm", "glm4", "smollm3",
    "cohere", "cohere2", "exaone4", "gemma", "ministral", "seed_oss", "vaultgemma", "qwen3_moe", "mixtral", "qwen2_moe",
    "gpt_oss",
]  # fmt: skip


def decode_all(policy: Policy, tokens: torch.Tensor, page: int = 4, merge: bool = False) -> torch.Tensor:
    """Hidden states of whole sequences, one fused decode step a token."""
    count, length = tokens.shape
    shapes = layer_shapes(policy)
    body = FusedBody(policy, shapes)
    body.make_room(empty if merge else None)
    body.refresh()
    body.set_positions(length)
    width = -(-length // page)
    cache = KVCache(shapes, count * width, page, policy.dtype, empty)
    space = body.workspace(count, empty)
    tables = torch.arange(count * width, device=DEVICE).view(count, width)
    index = torch.arange(count, device=DEVICE)
    done, shared = torch.zeros(count, dtype=torch.int32, device=DEVICE), torch.zeros_like(index)
    found = []
    with torch.no_grad():
        for t in range(length):
            batch = DecodeBatch(index, tables, torch.full_like(index, t), done, shared, None, page)
            found.append(body.decode(batch, tokens[:, t].contiguous(), cache, space).clone())
    return torch.stack(found, 1)


LIKE_OTHERS = ("cohere", "gemma", "glm", "ministral", "olmo2", "seed_oss", "vaultgemma", "exaone4")
"""Families made of parts that are compared in others."""


@pytest.mark.parametrize(
    "architecture", [pytest.param(each, marks=pytest.mark.slow if each in LIKE_OTHERS else ()) for each in FUSABLE]
)
def test_fused_prefill_equals_the_models_own(architecture: str) -> None:
    """Two sequences in one row, the second in two pieces."""
    policy = Policy(tiny_model(architecture, num_hidden_layers=2, head_dim=16).to(DEVICE))
    shapes = layer_shapes(policy)
    body = FusedBody(policy, shapes)
    body.set_positions(16)
    cache = KVCache(shapes, 8, 4, policy.dtype, empty)
    tokens = torch.randint(3, 80, (16,), generator=torch.Generator().manual_seed(0)).tolist()
    first = PrefillPlan(
        cache, [PrefillSegment(tokens[:7], 0, [5, 2]), PrefillSegment(tokens[7:10], 0, [1, 0, 7])], DEVICE
    )
    second = PrefillPlan(cache, [PrefillSegment(tokens[10:], 3, [1, 0, 7])], DEVICE)
    with torch.no_grad():
        found = [
            body.prefill(torch.tensor(part, device=DEVICE), plan.positions, plan)
            for part, plan in ((tokens[:10], first), (tokens[10:], second))
        ]
        whole = PackedPlan([7, 9], DEVICE)
        expected = policy.hidden(torch.tensor(tokens, device=DEVICE), whole.positions, whole)
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)


QUICK = ("qwen2", "gemma2", "cohere2")
"""With biases; with windows, soft caps and norms after; in parallel, turned by neighbours or not at all. Norms of heads and
multipliers have tests of their own (tests/model)."""


@pytest.mark.usefixtures("_few_splits")
@pytest.mark.parametrize(
    "architecture", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in FUSABLE]
)
def test_fused_layers_equal_the_models_own(architecture: str) -> None:
    policy = Policy(tiny_model(architecture, num_hidden_layers=2, head_dim=16).to(DEVICE))
    tokens = torch.randint(3, 80, (2, 9), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    plan = PackedPlan([9, 9], DEVICE)
    with torch.no_grad():
        expected = policy.hidden(tokens.flatten(), plan.positions, plan).view(2, 9, -1)
    torch.testing.assert_close(decode_all(policy, tokens), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("_few_splits")
@pytest.mark.parametrize(
    ("architecture", "merge"),
    [
        ("qwen2", False),
        ("phi3", True),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("qwen2", True), ("phi3", False))),
    ],
)
def test_adapters_are_seen_as_they_are(architecture: str, merge: bool) -> None:
    """PEFT's LoRA on every linear layer, merged into a copy or applied beside; a refresh takes over what has changed."""
    adapted = get_peft_model(
        tiny_model(architecture, num_hidden_layers=2), LoraConfig(r=4, lora_alpha=6, target_modules="all-linear")
    ).to(DEVICE)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    policy = Policy(adapted)
    tokens = torch.randint(3, 80, (2, 5), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    plan = PackedPlan([5, 5], DEVICE)
    with torch.no_grad():
        expected = policy.hidden(tokens.flatten(), plan.positions, plan).view(2, 5, -1)
        with adapted.disable_adapter():
            bare = policy.hidden(tokens.flatten(), plan.positions, plan).view(2, 5, -1)
    torch.testing.assert_close(decode_all(policy, tokens, merge=merge), expected, atol=1e-4, rtol=1e-4)
    assert (expected - bare).abs().max() > 0.05


@pytest.mark.parametrize(("merge", "at_once"), [(False, 1), (True, 12), (True, 2**23)])
def test_a_product_follows_its_adapters(merge: bool, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Merged whole, or two rows of six at a time."""
    monkeypatch.setattr("trimtab.rollout.native.fused.MERGE_CHUNK_ELEMENTS", at_once)
    linear, a, b = torch.nn.Linear(6, 5), torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(2, 3, bias=False)
    adapters = [Adapter(a, b, 0.5, 1, 4), Adapter(a, b, 0.25, 1, 4)]
    product = Product(Linears(WeightStore(linear.named_parameters()), [linear.weight], [linear.bias], adapters))
    x = torch.randn(7, 6)
    product.make_room((lambda shape, dtype: torch.empty(shape, dtype=dtype)) if merge else None)
    with torch.no_grad():
        for _ in range(2):
            product.refresh()
            assert product.beside is not merge
            expected = linear(x)
            expected[:, 1:4] += 0.75 * b(a(x))
            torch.testing.assert_close(product(x), expected)
            a.weight.mul_(3.0)
            linear.weight.add_(1.0)


@pytest.mark.parametrize("at_once", [1, 7, 12, 2**23])
def test_adapters_of_several_layers_are_merged_each_into_its_own(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries, keys and values lie one after the other. What is added is rounded once: two that cancel out leave no trace."""
    monkeypatch.setattr("trimtab.rollout.native.fused.MERGE_CHUNK_ELEMENTS", at_once)
    torch.manual_seed(0)
    linear, places = torch.nn.Linear(6, 9, bias=False).bfloat16(), ((0, 4), (4, 7), (7, 9))
    pairs = [(torch.nn.Linear(6, 2, bias=False), torch.nn.Linear(2, end - start, bias=False)) for start, end in places]
    adapters = [
        Adapter(*pair, scale, *place) for pair, place in zip(pairs, places) for scale in (100.0, -100.0, 0.5)
    ]  # fmt: skip
    product = Product(Linears(WeightStore(linear.named_parameters()), [linear.weight], None, adapters))
    before = linear.weight.detach().clone()
    product.make_room(lambda shape, dtype: torch.full(shape, float("nan"), dtype=dtype))
    with torch.no_grad():
        product.refresh()
        wanted = before + 0.5 * torch.cat([b.weight @ a.weight for a, b in pairs])
        found = product(torch.eye(6, dtype=torch.bfloat16)).t()
    torch.testing.assert_close(found.float(), wanted, atol=1e-4, rtol=2**-8)
    assert torch.equal(linear.weight, before)


def test_merging_takes_little_memory_beside_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.rollout.native.fused.MERGE_CHUNK_ELEMENTS", 40)
    linear = torch.nn.Linear(20, 8, bias=False).bfloat16()
    a, b = torch.nn.Linear(20, 1, bias=False), torch.nn.Linear(1, 8, bias=False)
    product = Product(
        Linears(WeightStore(linear.named_parameters()), [linear.weight], None, [Adapter(a, b, 0.5, 0, 8)])
    )
    product.make_room(lambda shape, dtype: torch.empty(shape, dtype=dtype))
    sizes: list[int] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            made = function(*arguments, **keywords or {})
            if isinstance(made, torch.Tensor) and made.dtype == torch.float32:
                sizes.append(made.numel())
            return made

    with Noted():
        product.refresh()
    assert max(sizes) == 40, "two rows at a time"


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("gpt2", "not tested with the architecture"),
        ("ernie4_5", "not tested with the architecture"),
        ("olmoe", "not tested with the architecture"),
    ],
)
def test_what_is_not_known_is_not_fused(architecture: str, reason: str) -> None:
    policy = Policy(tiny_model(architecture).to(DEVICE))
    with pytest.raises(Unfusable, match=reason):
        FusedBody(policy, layer_shapes(policy))


def test_joined_weights_stay_the_models_own(tmp_path) -> None:
    """An optimizer's in-place step on the parameters is seen by the joined tensor; saving and loading still work."""
    model = tiny_model("qwen2")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    projections = [model.model.layers[0].self_attn.get_submodule(f"{n}_proj") for n in "qkv"]
    whole = WeightStore(model.named_parameters()).joined([p.weight for p in projections])
    assert whole.data_ptr() == projections[0].weight.data_ptr()
    torch.testing.assert_close(model.state_dict(), before, atol=0, rtol=0)
    with torch.no_grad():
        projections[1].weight.add_(1.0)
    torch.testing.assert_close(whole, torch.cat([p.weight for p in projections]), atol=0, rtol=0)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(again.state_dict(), model.state_dict(), atol=0, rtol=0)


def test_the_list_of_known_architectures_is_what_is_compared_here() -> None:
    assert set(FUSABLE) == FUSED_FAMILIES


def decoder_of(policy: Policy, forgotten: list[int]) -> cuda.CudaDecoder:
    """As much of a decoder as begins calls, without a device; it notes when it forgets its graphs."""
    decoder = cuda.CudaDecoder.__new__(cuda.CudaDecoder)
    decoder.policy, decoder._shapes = policy, layer_shapes(policy)
    decoder._rows, decoder._copies, decoder._together, decoder._merge_undecided = None, None, None, False
    decoder.arena = Arena(256, torch.device("cpu"))
    decoder._body, decoder.description = decoder._fuse()
    decoder._watch = Watch(policy.model)
    decoder._known_model = decoder._watch.look()
    decoder._forget_graphs = lambda: forgotten.append(1)
    decoder._decide_merging = lambda: None
    return decoder


def test_positions_are_known_for_new_rows_and_for_longer_calls() -> None:
    """The decoder's own comparison makes tables of 1,024 positions; the first call, and one with larger rows, need more."""
    forgotten: list[int] = []
    policy = Policy(tiny_model("llama", num_hidden_layers=1, max_position_embeddings=16384))
    decoder = decoder_of(policy, forgotten)
    decoder._body.set_positions(6)

    def begin(rows: Rows, longest: int) -> int:
        decoder.begin(rows, Sampling(), longest)
        return decoder._body.rotaries["full_attention"].cos.shape[0]

    first, larger = (Rows(1, 1, width, 1, torch.device("cpu")) for width in (4, 8))
    assert begin(first, 3100) >= 3100
    assert begin(larger, 4100) >= 4100
    assert len(forgotten) == 2
    assert begin(larger, 4100) >= 4100
    assert len(forgotten) == 2  # nothing moved, so graphs stay
    assert begin(larger, 8200) >= 8200
    assert len(forgotten) == 3


def test_parameters_put_elsewhere_are_followed() -> None:
    forgotten: list[int] = []
    policy = Policy(tiny_model("llama", num_hidden_layers=1))
    decoder = decoder_of(policy, forgotten)
    rows = Rows(1, 1, 4, 1, torch.device("cpu"))
    decoder.begin(rows, Sampling(), 16)
    before, body = len(forgotten), decoder._body
    decoder.begin(rows, Sampling(), 16)
    assert (len(forgotten), decoder._body) == (before, body)
    for parameter in policy.model.parameters():
        parameter.data = parameter.data + 1.0
    decoder.begin(rows, Sampling(), 16)
    assert len(forgotten) > before
    attention = policy.body.layers[0].self_attn
    torch.testing.assert_close(
        decoder._body.layers[0].qkv.weight[: attention.q_proj.out_features], attention.q_proj.weight
    )
    assert decoder._body.layers[0].qkv.weight.data_ptr() == attention.q_proj.weight.data_ptr()


def test_adapters_switched_by_hand_are_followed() -> None:
    model = tiny_model("llama", num_hidden_layers=1)
    settings = LoraConfig(r=2, target_modules=["q_proj"])
    model = get_peft_model(model, settings)
    model.add_adapter("other", settings)
    policy = Policy(model)
    decoder = decoder_of(policy, [])
    rows = Rows(1, 1, 4, 1, torch.device("cpu"))
    decoder.begin(rows, Sampling(), 16)
    (adapter,) = decoder._body.layers[0].qkv.adapters
    assert adapter.a is policy.body.layers[0].self_attn.q_proj.lora_A["default"]
    model.set_adapter("other")
    decoder.begin(rows, Sampling(), 16)
    (adapter,) = decoder._body.layers[0].qkv.adapters
    assert adapter.a is policy.body.layers[0].self_attn.q_proj.lora_A["other"]
