"""Tokens that an environment wrote are read and never learned: rows, gradients, scores and values against masks made by hand."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import VOCABULARY, tiny_model

from tests.update.test_critic import critic_of
from tests.update.test_updater import OBJECTIVES, gradient
from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.data.prompt import Prompt
from trimtab.learn.advantages import gae
from trimtab.model.policy import Policy
from trimtab.rollout.trajectory import Group, Trajectory
from trimtab.update.batch import MicroBatch, Sample, parts_by_prompt, row_tokens
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.packing import pack
from trimtab.update.samples import set_advantages, set_weights, shaped_rewards, to_samples, usable
from trimtab.update.updater import Updater

CPU = torch.device("cpu")
MASKS = ["oooo", "oo..o", "o.o.o", "ooo...ooo..o", "..oo", "o", "oo..oooo", "o...."]
"""o: the model's token, a dot: the environment's."""


def mask(text: str) -> torch.Tensor:
    return torch.tensor([letter == "o" for letter in text])


def samples(dtype: torch.dtype = torch.float64) -> list[Sample]:
    """Interleaved completions; every two share a prompt."""
    g = torch.Generator().manual_seed(1)
    made = []
    for number, text in enumerate(MASKS):
        own, n = mask(text), text.count("o")
        length = 2 + number // 2
        prompt = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        draws = [-4.5 + 0.3 * torch.randn(n, generator=g, dtype=dtype) for _ in range(3)]
        made.append(
            Sample(
                prompt,
                torch.randint(3, VOCABULARY, (len(own),), generator=g),
                advantages=torch.randn((), generator=g, dtype=dtype).expand(n),
                weights=torch.full((n,), 1 / 27.0, dtype=dtype),
                engine_logprobs=draws[0],
                old_logprobs=draws[1],
                ref_logprobs=draws[2],
                policy_mask=own,
            )
        )
    return made


def reference_gradient(batch: list[Sample], learn: Learn, kl_coef: float) -> dict[str, torch.Tensor]:
    """One padded forward through transformers' own attention over whole sequences; the loss times a mask, token by token."""
    model = tiny_model("llama", torch.float64)
    model.set_attn_implementation("eager")
    rows = [[*s.prompt_tokens, *s.tokens.tolist()] for s in batch]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    logits = model(input_ids=ids, use_cache=False).logits / learn.sampling.temperature
    total = torch.zeros((), dtype=torch.float64)
    for i, s in enumerate(batch):
        start = len(s.prompt_tokens)
        distribution = logits[i, start - 1 : len(rows[i]) - 1].log_softmax(-1)
        logp = distribution.gather(1, s.tokens[:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1)
        kept = s.policy_mask.double()

        def spread(values: torch.Tensor, own: torch.Tensor = s.policy_mask) -> torch.Tensor:
            """Values of learned tokens at their places among all tokens, zeros elsewhere."""
            return torch.zeros(len(own), dtype=torch.float64).masked_scatter(own, values.double())

        old, ref, engine, advantage = map(spread, (s.old_logprobs, s.ref_logprobs, s.engine_logprobs, s.advantages))
        low, high = 1 - learn.clip.low, 1 + learn.clip.high
        gap = (logp - old) * kept
        if learn.loss == "gspo":
            ratio = (gap.sum() / kept.sum()).exp()
        else:
            ratio = gap.exp()
        if learn.loss in ("clip", "gspo"):
            loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            if learn.clip.dual:
                loss = torch.where(advantage < 0, torch.minimum(loss, -learn.clip.dual * advantage), loss)
        elif learn.loss == "cispo":
            loss = -ratio.clamp(low, high).detach() * advantage * logp
        else:
            loss = -advantage * logp
        if learn.importance.level != "off":
            apart = (old - engine) * kept
            weight = apart.exp() if learn.importance.level == "token" else apart.sum().exp().expand_as(apart)
            loss = loss * (
                weight.clamp(max=learn.importance.cap)
                if learn.importance.mode == "truncate"
                else weight * (weight <= learn.importance.cap)
            )
        kl = {"k2": (logp - ref) ** 2 / 2, "k3": (ref - logp).exp() - (ref - logp) - 1}
        loss = loss + kl_coef * kl[learn.kl.estimator] - learn.entropy_coef * entropy
        total = total + (kept * spread(s.weights) * loss).sum()
    total.backward()
    return {n: p.grad for n, p in model.named_parameters()}


@pytest.mark.parametrize("budget", [20, 4096])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_equals_a_padded_one_whose_loss_is_masked_by_hand(name: str, budget: int) -> None:
    learn = resolve(Learn(**OBJECTIVES[name]))
    batch = samples()
    expected = reference_gradient(batch, learn, learn.kl.coef)
    found = gradient(batch, learn, learn.kl.coef, token_budget=budget)
    scale = max(g.abs().max() for g in expected.values())
    for key, value in expected.items():
        torch.testing.assert_close(
            found[key], value, atol=float(scale) * 2e-6, rtol=0, msg=lambda m, k=key: f"{k}: {m}"
        )


def test_what_an_environment_wrote_matters_but_its_own_likelihood_does_not() -> None:
    """Another reply changes the gradient through what the model read; the reply itself has no entry anywhere."""
    learn = resolve(Learn())
    batch, other = samples(), samples()
    other[1].tokens[2] = (other[1].tokens[2] + 1) % VOCABULARY
    one, two = gradient(batch, learn, 0.0), gradient(other, learn, 0.0)
    assert any(not torch.equal(one[name], two[name]) for name in one)
    built = MicroBatch.build(batch, CPU)
    assert len(built.targets_R) == sum(text.count("o") for text in MASKS) == sum(s.learned for s in batch)


PIECES = st.lists(st.tuples(st.booleans(), st.integers(1, 6)), min_size=1, max_size=6)
GROUPS = st.lists(st.tuples(st.integers(1, 9), st.lists(PIECES, min_size=1, max_size=4)), min_size=1, max_size=4)


@settings(max_examples=200, deadline=None)
@given(GROUPS, st.integers(0, 60))
def test_any_interleaving_is_packed_whole_and_only_own_tokens_are_targets(groups, spare: int) -> None:
    made, mark = [], 0
    for g, (prompt, completions) in enumerate(groups):
        for pieces in completions:
            mark += 1
            own = torch.tensor([mine for mine, length in pieces for _ in range(length)])
            values = torch.arange(int(own.sum()), dtype=torch.float32) + 100 * mark
            tokens = torch.arange(len(own)) + 1000 * mark
            made.append(Sample(list(range(g, g + prompt)), tokens, values, values, values, policy_mask=own))
    budget = max(map(len, made)) + spare
    parts = parts_by_prompt(made, budget)
    batches = [
        MicroBatch.build([s for i in indices for s in parts[i]], CPU)
        for indices in pack([row_tokens(part) for part in parts], budget)
    ]
    wanted = Counter(t for s in made for t in s.tokens[s.policy_mask].tolist())
    assert Counter(t for b in batches for t in b.targets_R.tolist()) == wanted
    for batch in batches:
        assert batch.tokens_T.shape[0] <= budget
        assert sum(batch.plan.lengths) == batch.tokens_T.shape[0]
        before = [
            ([s.prompt_tokens[-1], *s.tokens.tolist()])[place]
            for s in batch.samples
            for place in s.policy_mask.nonzero()[:, 0]
        ]
        assert batch.tokens_T[batch.predictors_R].tolist() == before
        owners = [i for i, s in enumerate(batch.samples) for _ in range(s.learned)]
        assert batch.sequence_R.tolist() == owners
        batch.scatter(batch.targets_R.float() + 0.5, "old_logprobs")
    for sample in made:
        assert torch.equal(sample.old_logprobs, sample.tokens[sample.policy_mask].float() + 0.5)


@pytest.mark.parametrize("budget", [20, 4096])
def test_scores_are_those_of_own_tokens(budget: int) -> None:
    policy = Policy(tiny_model("llama", torch.float64))
    updater = Updater(
        policy,
        PolicyGradient(resolve(Learn())),
        resolve(Learn()),
        token_budget=64,
        score_token_budget=budget,
        logprob_chunk=8,
        checkpoint_activations=False,
    )
    batch = samples()
    updater.score(batch, policy, "old_logprobs")
    policy.model.set_attn_implementation("eager")
    for sample in batch:
        ids = torch.tensor([[*sample.prompt_tokens, *sample.tokens.tolist()]])
        with torch.no_grad():
            logits = policy.model(input_ids=ids, use_cache=False).logits[0]
        start = len(sample.prompt_tokens)
        all_of_them = logits[start - 1 : -1].log_softmax(-1).gather(1, sample.tokens[:, None])[:, 0]
        torch.testing.assert_close(sample.old_logprobs.double(), all_of_them[sample.policy_mask], atol=1e-5, rtol=0)


@pytest.mark.parametrize("budget", [20, 4096])
def test_a_critic_values_own_tokens_only(budget: int) -> None:
    batch, made = samples(), critic_of(budget)
    made.score(batch, made.policy, "values")
    made.policy.model.set_attn_implementation("eager")
    for sample in batch:
        ids = torch.tensor([[*sample.prompt_tokens, *sample.tokens.tolist()]])
        hidden = made.policy.model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
        values = made.objective.head(hidden[len(sample.prompt_tokens) - 1 : -1]).squeeze(-1)
        torch.testing.assert_close(sample.values.double(), values[sample.policy_mask], atol=1e-5, rtol=0)


def group(texts: list[str], rewards: list[float | None], prompt: Prompt | None = None) -> Group:
    prompt = prompt or Prompt(0, "q", [5, 6])
    made = []
    for number, (text, reward) in enumerate(zip(texts, rewards)):
        own, n = mask(text), text.count("o")
        tokens = torch.arange(len(own)) + 3
        made.append(
            Trajectory(prompt, number, tokens, -torch.ones(n), torch.zeros(n), "stop", reward=reward, policy_mask=own)
        )
    return Group(prompt, made)


def test_gae_steps_from_own_token_to_own_token() -> None:
    learn = resolve(Learn(algorithm="ppo", critic={"gamma": 0.9, "lam": 0.8}))
    groups = [group(["o..oo", "oo.o"], [1.0, -1.0])]
    made = to_samples(groups)
    for number, sample in enumerate(made[0]):
        sample.values = torch.linspace(0.1, 0.5, 3) * (number + 1)
    set_advantages(groups, made, learn, 0.0)
    earned = torch.tensor([0, 0, 1.0, 0, 0, -1.0]).double()
    values = torch.cat([s.values for s in made[0]]).double()
    _, returns = gae(earned, values, torch.tensor([0, 3, 6]), 0.9, 0.8)
    torch.testing.assert_close(torch.cat([s.returns for s in made[0]]).double(), returns, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [("token_mean", [1 / 6] * 6), ("sequence_mean", [1 / 4, 1 / 4, 1 / 8, 1 / 8, 1 / 8, 1 / 8])],
)
def test_normalisers_count_own_tokens(aggregate: str, expected: list[float]) -> None:
    groups = [group(["o...o", "oo.o..o"], [1.0, 0.0])]
    made = to_samples(groups)
    set_weights(groups[0].trajectories, made[0], resolve(Learn(aggregate=aggregate)))
    torch.testing.assert_close(torch.cat([s.weights for s in made[0]]).double(), torch.tensor(expected).double())
    assert [len(t) for t in groups[0].trajectories] == [2, 4]


def test_the_penalty_for_running_long_counts_all_that_was_used_up() -> None:
    """Openings and replies use up max_new_tokens as the model's own tokens do."""
    learn = resolve(Learn(max_new_tokens=10, overlong={"buffer": 4}))
    scored = group(["oo", "o......o"], [0.0, 0.0])
    opened = Prompt(0, "q", [5, 6, 7, 7])
    scored.trajectories[0].prompt = opened
    torch.testing.assert_close(shaped_rewards([scored], learn), torch.tensor([0.0, -0.5]).double())


def test_what_an_environment_lost_has_a_reason_of_its_own() -> None:
    scored = group(["oo", "o.o", "o"], [1.0, None, None])
    scored.trajectories[1].failure, scored.trajectories[1].failed_in = "it hung", "environment"
    scored.trajectories[2].failure = "the reward hung"
    kept, dropped = usable([scored])
    assert len(kept[0].trajectories) == 1
    assert dropped == {"environment_failed": 1, "reward_failed": 1}
