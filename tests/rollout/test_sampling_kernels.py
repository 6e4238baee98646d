"""Sampling kernels: the token, the log-prob and the row's new state are those of the CPU reference, `sampler.sample`.

On a machine with a CUDA device the compiled kernels run; elsewhere Triton's interpreter runs them, on the variable that
tests/conftest.py sets before anything imports Triton.
"""

from __future__ import annotations

import math
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.config.learn import Sampling
from trimtab.rollout.sampler import keep, sample, stream_key, uniforms

pytest.importorskip("triton", reason="the sampling kernels are written in Triton, which is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF = float("inf")
FILTERS = [
    Sampling(top_k=1),
    Sampling(top_k=7),
    Sampling(top_p=0.3),
    Sampling(top_p=0.9),
    Sampling(min_p=0.05),
    Sampling(top_k=20, top_p=0.83),
    Sampling(top_k=20, min_p=0.1),
    Sampling(temperature=0.7, top_k=30, top_p=0.95, min_p=0.02),
]


@pytest.fixture(params=[DEVICE])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def kernels() -> ModuleType:
    from trimtab.rollout.native.kernels import sampling

    return sampling


def rows_of(count: int, length: int = 4, stops: tuple[int, ...] = (), device: str = DEVICE):
    """Rows that have drawn one token already, each on its own stream."""
    whole = torch.ones(count, dtype=torch.int64, device=device)
    return kernels().RowState(
        last_tokens=-whole,
        positions=torch.arange(count, device=device) + 10,
        generated=whole.clone(),
        keys=torch.tensor([stream_key(3, 1, 4, r) for r in range(count)], device=device),
        limits=whole * length,
        done=torch.zeros(count, dtype=torch.int32, device=device),
        tokens=torch.full((count, length), -1, dtype=torch.int64, device=device),
        logprobs=torch.zeros(count, length, device=device),
        stop_ids=torch.tensor(stops, dtype=torch.int64, device=device),
    )


def draw(logits: torch.Tensor, rows, sampling: Sampling, index: torch.Tensor | None = None, **options: float):
    index = torch.arange(len(logits)) if index is None else index
    launch = kernels().Draw(len(logits) + 1, logits.shape[1], rows.done.device)
    launch(logits.to(rows.done.device), index.to(rows.done.device), rows, sampling, **options)
    return launch


def scores(logits: torch.Tensor, sampling: Sampling, scale: float = 1.0, softcap: float | None = None) -> torch.Tensor:
    z = logits.float() * scale
    z = softcap * torch.tanh(z / softcap) if softcap else z
    return z / sampling.temperature if sampling.temperature else z


def check(logits: torch.Tensor, sampling: Sampling, device: str, **options: float):
    """One step of every row, against the reference."""
    rows = rows_of(len(logits), device=device)
    launch = draw(logits, rows, sampling, **options)
    z = scores(logits, sampling, **options)
    tokens, logprobs = sample(z, sampling, rows.keys.cpu(), torch.ones(len(z), dtype=torch.int64))
    assert rows.last_tokens.tolist() == tokens.tolist()
    torch.testing.assert_close(rows.logprobs[:, 1].cpu(), logprobs, rtol=2e-6, atol=1e-5 if options else 3e-6)
    return launch


def kept_by(launch, z: torch.Tensor) -> torch.Tensor:
    """The kept set as the kernels hold it: scores above the floor, and the first few equal to it."""
    bits = torch.where(z == 0, 0.0, z).view(torch.int32)
    image = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    floor, quota = launch._floor_B[: len(z), None].cpu(), launch._quota_B[: len(z), None].cpu()
    equal = image == floor
    return (image > floor) | (equal & (equal.cumsum(-1) <= quota))


def key_for(u: float, position: int) -> int:
    """The stream key whose number at `position` is `u`: the hash is a bijection, undone step by step."""
    x = int(u * 2**53) << 11

    def unshift(x: int, bits: int) -> int:
        y = x
        for _ in range(64 // bits):
            y = x ^ (y >> bits)
        return y

    x = unshift(x, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    x = unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    x = (unshift(x, 30) - (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    return x - 2**64 if x >= 2**63 else x


def tokens_at(us: list[float], logits: torch.Tensor, sampling: Sampling, device: str) -> list[int]:
    """What one distribution yields at chosen uniform numbers."""
    rows = rows_of(len(us), device=device)
    keys = torch.tensor([key_for(u, 1) for u in us])
    assert uniforms(keys, torch.ones_like(keys)).tolist() == us
    rows.keys.copy_(keys)
    draw(logits.expand(len(us), -1), rows, sampling)
    tokens: list[int] = rows.last_tokens.tolist()
    return tokens


@pytest.mark.parametrize("vocabulary", [1, 85, 5000, 9000])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_tokens_and_logprobs_are_the_references(vocabulary: int, temperature: float, device: str) -> None:
    check(torch.randn(4, vocabulary) * 3, Sampling(temperature=temperature), device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0), Sampling(top_k=7, top_p=0.9)])
def test_half_precision_logits_are_taken_as_they_are(dtype: torch.dtype, sampling: Sampling, device: str) -> None:
    check((torch.randn(4, 300) * 3).to(dtype), sampling, device)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(temperature=0.0), FILTERS[-1]])
def test_logits_are_scaled_and_capped_before_the_temperature(sampling: Sampling, device: str) -> None:
    check(torch.randn(4, 300) * 40, sampling, device, scale=0.5, softcap=15.0)
    check(torch.randn(4, 300), sampling, device, scale=0.01, softcap=30.0)


@pytest.mark.parametrize("sampling", FILTERS, ids=lambda s: f"t{s.temperature}-k{s.top_k}-p{s.top_p}-m{s.min_p}")
def test_filters_keep_what_the_reference_keeps(sampling: Sampling, device: str) -> None:
    logits = torch.randn(4, 301) * 3
    logits[1] = logits[1].round()
    logits[2, ::3] = -INF
    logits[3] = 0.0
    logits[3, ::2] = -0.0
    z = scores(logits, sampling)
    kept = kept_by(check(logits, sampling, device), z)
    # Where only tokens without mass are left, keeping them or not makes no difference.
    assert torch.equal(kept & (z > -INF), keep(z, sampling) > -INF)


def test_filters_work_across_chunks(device: str) -> None:
    logits = (torch.randn(2, 9000) * 12).round() / 4
    check(logits, Sampling(top_k=40, top_p=0.9, min_p=0.01), device)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    levels=st.lists(st.sampled_from([-INF, -30.0, -2.0, -0.5, -0.0, 0.0, 0.25, 3.0]), min_size=6, max_size=24),
    top_k=st.integers(0, 26),
    top_p=st.sampled_from([1.0, 0.999, 0.77, 0.413, 0.05]),
    min_p=st.sampled_from([0.0, 0.043, 0.61]),
    u=st.floats(0, 1, exclude_max=True),
)
def test_any_ties_are_kept_in_index_order(
    levels: list[float], top_k: int, top_p: float, min_p: float, u: float
) -> None:
    z = torch.tensor([[*levels, 0.5]])
    sampling = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    ordered = z[0].double().sort(descending=True, stable=True)[0][: top_k or None].softmax(-1)
    before = ordered.cumsum(-1) - ordered
    if (before - top_p).abs().min() < 1e-5:
        return
    rows = rows_of(1)
    rows.keys.fill_(key_for(u, 1))
    launch = draw(z, rows, sampling)
    expected = keep(z, sampling)
    if (top_k and top_k <= len(levels)) or top_p < 1 or min_p:
        assert torch.equal(kept_by(launch, z) & (z > -INF), expected > -INF)
    mass = expected[0].double().exp()
    token, target = int(rows.last_tokens), u * float(mass.sum())
    assert mass[token] > 0
    assert float(mass[:token].sum()) - 1e-5 <= target <= float(mass[: token + 1].sum()) + 1e-5


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7), Sampling(top_k=4)])
def test_each_token_has_exactly_its_share_of_the_unit_interval(sampling: Sampling, device: str) -> None:
    logits = torch.tensor([[0.3, -1.0, -INF, 2.0, 1.5, -4.0, 0.3, -INF]])
    mass = keep(scores(logits, sampling), sampling)[0].double().softmax(-1)
    edges = torch.cat((torch.zeros(1), mass.cumsum(-1)))
    expected = [t for t in range(8) if mass[t] > 0 for _ in range(2)]
    us = [float(e) for t in range(8) if mass[t] > 0 for e in (edges[t] + 2e-7, edges[t + 1] - 2e-7)]
    us = [int(u * 2**53) / 2**53 for u in us]
    assert tokens_at(us, logits, sampling, device) == expected


@pytest.mark.parametrize("at", [0, 4095, 4096, 8191, 8192, 8999])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.9), Sampling(temperature=0.0)])
def test_a_token_with_all_the_mass_is_drawn_at_any_uniform(at: int, sampling: Sampling, device: str) -> None:
    logits = torch.full((1, 9000), -INF)
    logits[0, at] = -7.0
    assert tokens_at([0.0, 0.5, 1 - 2**-53], logits, sampling, device) == [at] * 3


def test_the_ends_of_the_interval_give_the_first_and_last_token_with_mass(device: str) -> None:
    logits = torch.randn(1, 9000)
    logits[0, :5] = -INF
    logits[0, 8995:] = -INF
    assert tokens_at([0.0, 1 - 2**-53], logits, Sampling(), device) == [5, 8994]


def test_greedy_takes_the_lowest_index_of_equal_logits(device: str) -> None:
    logits = torch.zeros(2, 9000)
    logits[0, [4095, 4096, 8999]] = 1.0
    logits[1, [8998, 8999]] = 1.0
    rows = rows_of(2, device=device)
    draw(logits, rows, Sampling(temperature=0.0, top_k=3))
    assert rows.last_tokens.tolist() == [4095, 8998]


def test_frequencies_follow_the_distribution(device: str) -> None:
    count = 20_000 if device == "cuda" else 100
    expected = torch.softmax(torch.tensor([1.0, 0.0, 0.5, -1.0, 0.2]), -1)
    rows = rows_of(count, device=device)
    draw(expected.log().expand(count, -1), rows, Sampling())
    found = torch.bincount(rows.last_tokens.cpu(), minlength=5)
    chi_square = ((found - count * expected) ** 2 / (count * expected)).sum()
    assert chi_square < 18.47  # 99.9 % of four degrees of freedom


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=3, top_p=0.9), Sampling(temperature=0.0)])
def test_rows_that_are_done_are_untouched(sampling: Sampling, device: str) -> None:
    rows = rows_of(4, device=device)
    rows.done.copy_(torch.tensor([0, 1, 2, 0]))
    before = {name: getattr(rows, name).clone() for name in vars(rows)}
    logits = torch.randn(3, 85)
    logits[1:] = float("nan")
    draw(logits, rows, sampling, torch.tensor([3, 2, 1], dtype=torch.int32))
    for name, value in before.items():
        assert torch.equal(getattr(rows, name)[:3], value[:3]), name
    assert rows.last_tokens[3] >= 0


@pytest.mark.parametrize("stops", [(), (2,), (0, 2, 3)])
def test_the_state_advances_and_ends_by_stop_token_or_limit(stops: tuple[int, ...], device: str) -> None:
    logits = torch.full((3, 85), -5.0)
    logits[torch.arange(3), torch.tensor([2, 7, 2])] = 60.0
    rows = rows_of(4, stops=stops, device=device)
    rows.limits[1:] = 2
    draw(logits, rows, Sampling(), torch.tensor([0, 1, 3]))
    ended = [1 if stops else 0, 2, 0, 1 if stops else 2]
    assert rows.done.tolist() == ended
    assert rows.last_tokens.tolist() == [2, 7, -1, 2]
    assert rows.generated.tolist() == [2, 2, 1, 2]
    assert rows.positions.tolist() == [11, 12, 12, 14]
    assert rows.tokens.tolist() == [[-1, 2, -1, -1], [-1, 7, -1, -1], [-1] * 4, [-1, 2, -1, -1]]


def test_a_row_draws_the_same_tokens_step_by_step_in_any_batch(device: str) -> None:
    wide = torch.randn(3, 120)
    logits = wide[:, :85]
    rows, alone = rows_of(3, device=device), rows_of(3, device=device)
    launch = kernels().Draw(3, 85, device)
    logits = logits if device == "cpu" else wide.to(device)[:, :85]
    for _ in range(3):
        launch(logits, torch.arange(3, device=device), rows, Sampling())
        launch(logits[2:], torch.tensor([2], device=device), alone, Sampling())
    assert rows.done.tolist() == [2, 2, 2]
    assert torch.equal(rows.tokens[2], alone.tokens[2])
    assert torch.equal(rows.logprobs[2], alone.logprobs[2])
    positions = torch.arange(1, 4)
    expected = sample(wide[2:, :85].expand(3, -1), Sampling(), rows.keys[2:].cpu().expand(3), positions)[0]
    assert rows.tokens[2, 1:].tolist() == expected.tolist()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0), Sampling(top_k=3, top_p=0.9, min_p=0.1)])
def test_broken_logits_show_in_the_logprob_and_stay_in_the_vocabulary(sampling: Sampling, device: str) -> None:
    logits = torch.randn(3, 85)
    logits[0, 7] = float("nan")
    logits[1] = float("nan")
    logits[2] = -INF
    rows = rows_of(3, device=device)
    draw(logits, rows, sampling)
    assert rows.logprobs[:, 1].isnan().all()
    assert ((rows.last_tokens >= 0) & (rows.last_tokens < 85)).all()


def test_nobody_to_draw_for_changes_nothing(device: str) -> None:
    rows = rows_of(1, device=device)
    before = {name: value.clone() for name, value in vars(rows).items()}
    nobody = torch.empty(0, dtype=torch.int64, device=device)
    kernels().Draw(5, 9000, device)(torch.empty(0, 9000, device=device), nobody, rows, Sampling())
    torch.testing.assert_close(vars(rows), before, atol=0, rtol=0, equal_nan=True)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=50, top_p=0.9)])
def test_a_captured_graph_draws_what_a_call_draws(sampling: Sampling) -> None:
    logits, index = torch.randn(8, 9000, device="cuda"), torch.arange(8, device="cuda")
    launch = kernels().Draw(8, 9000, "cuda")
    plain, replayed = rows_of(8), rows_of(8)
    launch(logits, index, plain, sampling)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(logits, index, replayed, sampling)
    graph.replay()
    launch(logits, index, plain, sampling)
    graph.replay()
    assert torch.equal(plain.tokens, replayed.tokens)
    assert math.isfinite(float(replayed.logprobs.sum()))
