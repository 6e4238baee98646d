"""The balancing loss of a mixture, and replayed routes: independent of how a step is cut, and equal to plain formulas."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tiny import tiny_model

from tests.update.test_updater import samples
from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.model.experts import expert_modules
from trimtab.model.policy import Policy
from trimtab.model.routing import Asked, Balance, routers_of
from trimtab.update.batch import MicroBatch, Sample
from trimtab.update.critic import open_critic
from trimtab.update.mixture import MixtureLoss
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.shares import Share
from trimtab.update.stats import UpdateStats
from trimtab.update.updater import Updater

COEFFICIENT = 0.7
BUDGETS = [(24, False), (45, "some"), (64, True), (100_000, False)]


def updater(policy: Policy, budget: int, recompute, coefficient: float = COEFFICIENT) -> Updater:
    learn = resolve(Learn(loss="on_policy", router_aux_coef=coefficient))
    return Updater(
        policy, PolicyGradient(learn), learn, token_budget=budget, score_token_budget=budget, logprob_chunk=16,
        checkpoint_activations=recompute,
    )  # fmt: skip


def gradient(work: Updater, batch: list[Sample]) -> dict[str, torch.Tensor]:
    work.accumulate(batch)
    return {name: p.grad.clone() for name, p in work.policy.model.named_parameters() if p.grad is not None}


def policy(architecture: str = "qwen3_moe") -> Policy:
    return Policy(tiny_model(architecture, torch.float64))


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float = 1e-7) -> None:
    assert one.keys() == two.keys() and one
    size = max(float(grad.abs().max()) for grad in one.values())
    for name, grad in one.items():
        torch.testing.assert_close(two[name], grad, atol=tolerance * size, rtol=0, msg=name)


def by_hand(architecture: str, batch: list[Sample], coefficient: float) -> dict[str, torch.Tensor]:
    """Every sample alone through transformers' own modules; shares of all of them together, then one backward pass."""
    model = tiny_model(architecture, torch.float64)
    model.set_attn_implementation("eager")
    routers, loss, chances, choices = routers_of(model), torch.zeros((), dtype=torch.float64), [], []
    for sample in batch:
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        hooks = [r.register_forward_hook(lambda _, i, out, to=seen: to.append((out[0], out[2]))) for r in routers]
        row = torch.tensor([*sample.prompt_tokens, *sample.tokens.tolist()])
        logits = model(input_ids=row[None], use_cache=False).logits[0]
        for hook in hooks:
            hook.remove()
        where = slice(len(sample.prompt_tokens) - 1, len(row) - 1)
        logp = logits[where].log_softmax(-1).gather(1, sample.tokens[:, None])[:, 0]
        loss = loss - (sample.weights * sample.advantages * logp).sum()
        chances.append(torch.stack([each[where].softmax(-1) for each, _ in seen]))
        choices.append(torch.stack([index[where] for _, index in seen]))
    probability, index = torch.cat(chances, 1), torch.cat(choices, 1)
    experts = probability.shape[-1]
    share = torch.nn.functional.one_hot(index, experts).double().mean((1, 2))
    balance = experts * (share.detach() * probability.mean(1)).sum(-1).mean()
    (loss + coefficient * balance).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_the_balancing_loss_is_the_formulas(architecture: str) -> None:
    batch = samples()
    found = gradient(updater(policy(architecture), 100_000, False), batch)
    assert_same(by_hand(architecture, batch, COEFFICIENT), found, 1e-6)
    with pytest.raises(AssertionError):
        assert_same(by_hand(architecture, batch, 0.0), found, 1e-3)


def test_it_is_the_same_for_every_way_to_cut_a_step() -> None:
    batch, known = samples(), policy()
    found = [gradient(updater(known, *settings), batch) for settings in BUDGETS if not known.model.zero_grad()]
    assert len({len(known.weights.parameters)}) == 1
    for other in found[1:]:
        assert_same(found[0], other, 1e-6)


def test_shares_of_a_micro_batch_would_break_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: counted for each micro-batch, the gradient depends on the cut."""
    batch, known, right = samples(), policy(), MixtureLoss.of

    def wrong(self, micro, share, filler, loss_scale=1.0):
        asked = right(self, micro, share, filler, loss_scale)
        counts = self.count([(micro, filler)])
        weights = asked.balance.weights_T
        return Asked(balance=Balance.of(counts, COEFFICIENT / len(share.batches), self._routers.used, weights))

    monkeypatch.setattr(MixtureLoss, "of", wrong)
    one, two = (
        gradient(updater(known, budget, False), batch) for budget in (24, 100_000) if not known.model.zero_grad()
    )
    with pytest.raises(AssertionError):
        assert_same(one, two, 1e-4)


def test_a_critic_has_experts_of_its_own_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key and the engine's routes are the policy's: the critic may be another model."""
    learn = resolve(Learn(router_aux_coef=COEFFICIENT))
    settings = {"token_budget": 100, "score_token_budget": 100, "logprob_chunk": 8, "checkpoint_activations": False}
    critic = open_critic(policy(), learn, **settings)
    assert not critic.balances and updater(policy(), 100, False).balances
    batch = MicroBatch.build(samples(), torch.device("cpu"))
    monkeypatch.setattr(MicroBatch, "routes", lambda self: torch.zeros((len(self.tokens_T), 3, 2), dtype=torch.int64))
    asked = critic._mixture.of(batch, Share([], [], [], 0), False)
    assert asked.replay_TLK is None and asked.balance is None
    assert updater(policy(), 100, False, 0.0)._mixture.of(batch, Share([], [], [], 0), False).replay_TLK is not None


def test_ranks_that_share_rows_add_up_what_each_counts_of_its_own_tokens() -> None:
    found = [
        UpdateStats(sums={"loss": torch.tensor(1.0), "routes_agreed": torch.tensor(n)}, tokens=5) for n in (1, 2, 3, 4)
    ]
    found[2].loss_scale = 0.5
    whole = UpdateStats.of_ranks(found, 1.0, sharing=2)
    assert (float(whole.sums["loss"]), float(whole.sums["routes_agreed"])) == (2.0, 10.0)
    assert (whole.tokens, whole.loss_scale) == (10, 0.5)


def test_without_the_key_nothing_is_counted() -> None:
    known = policy()
    plain = gradient(updater(known, 64, False, 0.0), samples())
    assert_same(by_hand("qwen3_moe", samples(), 0.0), plain, 1e-6)


@pytest.mark.parametrize(
    "architecture", ["qwen3_moe", "mixtral", "gpt_oss", "olmoe", "deepseek_v2", "deepseek_v3", "glm4_moe", "qwen2_moe"]
)
def test_what_a_router_chose_can_be_replayed(architecture: str) -> None:
    """Its own choice, replayed, changes nothing; another choice is what experts then get."""
    known = policy(architecture)
    batch = MicroBatch.build(samples(), known.device)
    chosen: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        with known.routers.during(Asked(record=chosen.__setitem__)):
            plain = known.hidden(batch.tokens_T, batch.plan.positions, batch.plan)
        routes = torch.stack([chosen[layer] for layer in range(len(known.routers.modules))], 1).to(torch.int16)
        asked = Asked(replay_TLK=routes)
        with known.routers.during(asked):
            again = known.hidden(batch.tokens_T, batch.plan.positions, batch.plan)
        torch.testing.assert_close(again, plain, atol=1e-6, rtol=0)
        replayed, agreed = torch.stack(asked.agreed).sum(0).tolist()
        assert replayed == agreed == routes.numel()
        other = (routes + 1) % known.routers.experts
        with known.routers.during(Asked(replay_TLK=other)) as changed, _experts_seen(known) as seen:
            assert not torch.allclose(known.hidden(batch.tokens_T, batch.plan.positions, batch.plan), plain, atol=1e-3)
        assert all(torch.equal(index, other[:, layer].long()) for layer, index in enumerate(seen))
        assert torch.stack(changed.agreed).sum(0)[1] < replayed


@contextlib.contextmanager
def _experts_seen(known: Policy):
    seen: list[torch.Tensor] = []
    hooks = [m.register_forward_pre_hook(lambda _, args: seen.append(args[1])) for m in expert_modules(known.model)]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def test_a_row_knows_the_routes_of_its_completions_and_of_no_prompt() -> None:
    batch = samples()
    for number, sample in enumerate(batch):
        if number != 2:
            places = torch.arange(len(sample.tokens), dtype=torch.int16)
            sample.routes = (100 * number + places)[:, None, None].expand(-1, 3, 2).clone()
    micro = MicroBatch.build(batch, torch.device("cpu"))
    routes = micro.routes()
    assert routes.shape == (len(micro.tokens_T), 3, 2)
    prompts = sum(length for length, prefix in zip(micro.plan.lengths, micro.plan._prefixes) if prefix is None)
    assert (routes[:prompts] == -1).all()
    at = prompts
    for sample in micro.samples:
        inside = len(sample.tokens) - 1
        expected = torch.full((inside, 3, 2), -1) if sample.routes is None else sample.routes[:inside]
        assert torch.equal(routes[at : at + inside].long(), expected.long())
        assert torch.equal(micro.tokens_T[at : at + inside], sample.tokens[:inside])
        at += inside
    assert at == len(routes)
