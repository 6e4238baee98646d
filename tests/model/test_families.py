"""The table of families in docs/models.md is true; and each family that is served computes what its own code does."""

from __future__ import annotations

import re

import pytest
import torch
from families import BEGIN, END, PAGE, kinds, look_at, tiny_of, written
from rollout.test_engine import engine, generate, prompts

from trimtab.base.errors import ModelError
from trimtab.model.context import NEAREST
from trimtab.model.packed import PackedPlan
from trimtab.model.policy import OWN_MODULES, Policy
from trimtab.model.sizes import FUSED_FAMILIES

ROW = re.compile(r"^\| `(?P<kind>[^`]+)` \| \w+ \| (?P<way>[\w ]+) \|", re.MULTILINE)


def rows() -> dict[str, str]:
    page = PAGE.read_text()
    return {found["kind"]: found["way"] for found in ROW.finditer(page[page.index(BEGIN) : page.index(END)])}


SERVED = sorted(kind for kind, way in rows().items() if way in ("fused", "plain"))


def test_the_table_has_every_family_and_says_which_are_fused() -> None:
    found = rows()
    assert set(found) >= FUSED_FAMILIES
    assert {kind for kind, way in found.items() if way == "fused"} == FUSED_FAMILIES


@pytest.mark.parametrize("kind", ["olmo2", "nemotron", "bert", "gemma3", "dbrx"])
def test_a_row_is_what_is_found(kind: str) -> None:
    """One of each; `make slow` looks at all."""
    assert rows()[kind] == look_at(kind).way


@pytest.mark.slow
def test_the_table_is_what_is_found() -> None:
    """`make docs` writes it."""
    page = PAGE.read_text()
    assert written(page, [look_at(kind) for kind in kinds()]) == page


def logprobs_alone(policy: Policy, tokens: torch.Tensor) -> torch.Tensor:
    """The family's own code, in its own attention."""
    policy.model.set_attn_implementation("eager")
    with torch.no_grad():
        logits = policy.model.eval()(input_ids=tokens[None], use_cache=False).logits[0]
    policy.model.set_attn_implementation("trimtab")
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind in ("smollm3", "gpt_bigcode") else pytest.mark.slow) for kind in SERVED],
)
def test_a_served_family_computes_what_its_own_code_does(kind: str) -> None:
    """Packed and sampled, in sequences longer than those that are tried when a model is loaded; in float64."""
    policy = Policy(tiny_of(kind))
    assert policy.description == OWN_MODULES
    g = torch.Generator().manual_seed(0)
    parts = [torch.randint(3, policy.config.vocab_size, (n,), generator=g) for n in (70, 90, 3)]
    plan = PackedPlan([len(part) for part in parts], "cpu")
    with torch.no_grad():
        found = policy.head.logits(policy.hidden(torch.cat(parts), plan.positions, plan)).double().log_softmax(-1)
    for part, packed in zip(parts, found.split(plan.lengths)):
        torch.testing.assert_close(packed, logprobs_alone(policy, part), atol=2e-5, rtol=0)
    native = engine(policy)
    for one in generate(native, prompts(3), samples=2).values():
        tokens = torch.tensor([*one.prompt.tokens, *one.tokens])
        own = logprobs_alone(policy, tokens)[len(one.prompt.tokens) - 1 : -1].gather(-1, one.tokens[:, None])
        torch.testing.assert_close(one.logprobs.double(), own[:, 0], atol=1e-4, rtol=0)


def test_the_nearest_families_are_served() -> None:
    found = rows()
    ways = {kind: found[near] for kind, near in NEAREST.items()}
    assert all(way in ("fused", "plain", "text part") for way in ways.values()), ways
    assert not [kind for kind in NEAREST if found.get(kind) in ("fused", "plain", "text part")]


@pytest.mark.parametrize(
    ("kind", "near"), [("llama4_text", "llama"), ("mamba", "falcon_h1"), ("bloom", "qwen3, llama or")]
)
def test_a_refusal_names_the_nearest(kind: str, near: str) -> None:
    with pytest.raises(ModelError, match=f"The nearest family that is served: {near}"):
        tiny_of(kind)
