"""The gradient of a step equals an independent one: padded, unchunked, in float64, written from the papers' formulas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from tiny import VOCABULARY, tiny_model

from trimtab.config.algorithms import resolve
from trimtab.config.learn import Learn
from trimtab.model.policy import Policy
from trimtab.observe.metrics import update_metrics
from trimtab.update import updater as updaters
from trimtab.update.batch import Sample
from trimtab.update.objectives.policy_gradient import PolicyGradient
from trimtab.update.updater import Updater

SHAPES = [(4, 9), (1, 3), (7, 1), (2, 12), (5, 5), (5, 5), (4, 1), (5, 8)]


def samples(seed: int = 0) -> list[Sample]:
    """Completions with arbitrary advantages, weights, and stale log-probs; prompts of equal length are the same prompt."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for prompt, length in SHAPES:
        tokens = torch.randint(3, VOCABULARY, (length,), generator=g)
        advantage = torch.randn((), generator=g)
        text = torch.randint(3, VOCABULARY, (prompt,), generator=torch.Generator().manual_seed(prompt)).tolist()
        made.append(
            Sample(
                text,
                tokens,
                advantages=advantage.expand(length),
                weights=torch.full((length,), 1 / 44.0),
                engine_logprobs=-4.5 + 0.3 * torch.randn(length, generator=g),
                old_logprobs=-4.5 + 0.3 * torch.randn(length, generator=g),
                ref_logprobs=-4.5 + 0.3 * torch.randn(length, generator=g),
            )
        )
    return made


def reference_gradient(batch: list[Sample], learn: Learn, kl_coef: float) -> dict[str, torch.Tensor]:
    """One padded forward through transformers' own attention; losses term by term, no shared code."""
    model = tiny_model("llama", torch.float64)
    model.set_attn_implementation("eager")
    longest = max(len(s) for s in batch)
    rows = [[*s.prompt_tokens, *s.tokens.tolist()] for s in batch]
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    logits = model(input_ids=ids, use_cache=False).logits / learn.sampling.temperature
    total = torch.zeros((), dtype=torch.float64)
    for i, s in enumerate(batch):
        start = len(s.prompt_tokens)
        distribution = logits[i, start - 1 : len(rows[i]) - 1].log_softmax(-1)
        logp = distribution.gather(1, s.tokens[:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1)
        old, ref, engine = s.old_logprobs.double(), s.ref_logprobs.double(), s.engine_logprobs.double()
        advantage = s.advantages.double()
        low, high = 1 - learn.clip.low, 1 + learn.clip.high
        if learn.loss == "clip":
            ratio = (logp - old).exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
            if learn.clip.dual:
                loss = torch.where(advantage < 0, torch.minimum(loss, -learn.clip.dual * advantage), loss)
        elif learn.loss == "gspo":
            ratio = (logp - old).mean().exp()
            loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)
        elif learn.loss == "cispo":
            loss = -(logp - old).exp().clamp(low, high).detach() * advantage * logp
        else:
            loss = -advantage * logp
        if learn.importance.level != "off":
            gap = old - engine
            weight = gap.exp() if learn.importance.level == "token" else gap.sum().exp().expand_as(gap)
            loss = loss * (
                weight.clamp(max=learn.importance.cap)
                if learn.importance.mode == "truncate"
                else weight * (weight <= learn.importance.cap)
            )
        kl = {"k1": logp - ref, "k2": (logp - ref) ** 2 / 2, "k3": (ref - logp).exp() - (ref - logp) - 1}
        loss = loss + kl_coef * kl[learn.kl.estimator] - learn.entropy_coef * entropy
        total = total + (s.weights.double() * loss).sum()
    total.backward()
    return {n: p.grad for n, p in model.named_parameters()}


def gradient(batch: list[Sample], learn: Learn, kl_coef: float, **changes) -> dict[str, torch.Tensor]:
    policy = Policy(tiny_model("llama", torch.float64))
    settings = {
        "token_budget": 64,
        "score_token_budget": 64,
        "logprob_chunk": 8,
        "checkpoint_activations": False,
        **changes,
    }
    updater = Updater(policy, PolicyGradient(learn), learn, **settings)
    captured = {}

    def capture(lr: float):
        captured.update({n: p.grad.clone() for n, p in policy.model.named_parameters()})
        raise StopIteration

    updater.optimizer.apply = capture
    with pytest.raises(StopIteration):
        updater.step(batch, 1.0, kl_coef)
    return captured


OBJECTIVES = {
    "grpo": {},
    "dual_clip": {"clip": {"low": 0.1, "high": 0.1, "dual": 1.5}},
    "dapo": {"algorithm": "dapo"},
    "gspo": {"algorithm": "gspo", "clip": {"low": 0.02, "high": 0.02}},
    "cispo": {"algorithm": "cispo", "clip": {"high": 0.2}},
    "reinforce": {"algorithm": "reinforce"},
    "entropy": {"entropy_coef": 0.3},
    "kl_k2": {"kl": {"coef": 0.1, "estimator": "k2"}},
    "kl_k3": {"kl": {"coef": 0.1, "estimator": "k3"}},
    "token_correction": {"importance": {"level": "token", "cap": 1.1}},
    "sequence_correction": {"importance": {"level": "sequence", "cap": 1.5}},
    "masked_correction": {"importance": {"level": "token", "cap": 1.1, "mode": "mask"}},
    "temperature": {"sampling": {"temperature": 0.7}},
}


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradient_equals_an_independent_padded_one(name: str) -> None:
    learn = resolve(Learn(**OBJECTIVES[name]))
    batch = samples()
    expected = reference_gradient(batch, learn, learn.kl.coef)
    found = gradient(batch, learn, learn.kl.coef)
    assert found.keys() == expected.keys()
    for key in expected:
        scale = expected[key].abs().max()
        torch.testing.assert_close(
            found[key] / scale, expected[key] / scale, atol=1e-5, rtol=0, msg=lambda m, k=key: f"{k}: {m}"
        )


@pytest.mark.parametrize(
    "changes",
    [{"token_budget": 14}, {"token_budget": 37}, {"logprob_chunk": 1}, {"checkpoint_activations": True}],
    ids=str,
)
@pytest.mark.parametrize("name", ["grpo", "gspo", "sequence_correction", "kl_k3"])
def test_gradient_does_not_depend_on_how_the_step_is_cut(name: str, changes: dict) -> None:
    learn = resolve(Learn(**OBJECTIVES[name]))
    whole, cut = gradient(samples(), learn, learn.kl.coef), gradient(samples(), learn, learn.kl.coef, **changes)
    for key in whole:
        scale = float(whole[key].abs().max())
        torch.testing.assert_close(cut[key], whole[key], atol=1e-6 * scale, rtol=0)


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped() -> None:
    batch = samples()
    for sample in batch:
        sample.old_logprobs = sample.ref_logprobs = None
    policy = Policy(tiny_model("llama"))
    updater = Updater(
        policy,
        PolicyGradient(resolve(Learn())),
        resolve(Learn()),
        token_budget=30,
        score_token_budget=30,
        logprob_chunk=8,
        checkpoint_activations=False,
    )
    stats = updater.step(batch, 1e-3, 0.0)
    assert stats.mean("ratio") == 1.0
    assert stats.mean("clipped") == 0.0
    assert stats.mean("kl_old") == 0.0
    assert stats.tokens == sum(length for _, length in SHAPES)
    # Prompts of 4 and 5 tokens are shared, where the budget leaves their samples together; a last token predicts nothing.
    assert stats.row_tokens < sum(prompt + length - 1 for prompt, length in SHAPES)
    assert stats.largest <= 30
    assert stats.microbatches == 3


def test_kl_old_is_the_kl_that_tokens_of_the_old_policy_estimate() -> None:
    """Averaged over all that the old policy draws: KL(old || policy), though the policy has all but given some tokens up."""
    model = tiny_model("llama", torch.float64)
    old = torch.linspace(-2, 2, VOCABULARY, dtype=torch.float64).softmax(0)
    with torch.no_grad():
        model.lm_head.weight *= 4
        policy = model(input_ids=torch.tensor([[5, 9]]), use_cache=False).logits[0, -1].log_softmax(0)
    expected = float((old * (old.log() - policy)).sum())
    updater = Updater(
        Policy(model),
        PolicyGradient(resolve(Learn())),
        resolve(Learn()),
        token_budget=300,
        score_token_budget=300,
        logprob_chunk=8,
        checkpoint_activations=False,
    )
    none, found = torch.zeros(1), 0.0
    for token, probability in enumerate(old):
        sample = Sample([5, 9], torch.tensor([token]), none, none, none, old_logprobs=probability.log()[None])
        found += float(probability) * updater.step([sample], 0.0, 0.0).mean("kl_old")
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_failed_half_way_is_repeated_as_if_it_had_not(dtype: torch.dtype) -> None:
    batch = samples()
    for sample in batch:
        sample.old_logprobs = sample.ref_logprobs = None
    norms = []
    for failing in (False, True):
        policy = Policy(tiny_model("llama", dtype))
        settings = {"token_budget": 30, "score_token_budget": 30, "logprob_chunk": 8, "checkpoint_activations": False}
        updater = Updater(policy, PolicyGradient(resolve(Learn())), resolve(Learn()), **settings)
        if failing:
            run, calls = policy.hidden, []

            def fail_once(*arguments, run=run, calls=calls):
                calls.append(1)
                if len(calls) == 2:
                    raise torch.OutOfMemoryError("of the second micro-batch")
                return run(*arguments)

            policy.hidden = fail_once
            with pytest.raises(torch.OutOfMemoryError):
                updater.step(batch, 1e-3, 0.0)
        norms.append(updater.step(batch, 1e-3, 0.0).grad_norm)
    assert norms[0] == norms[1] > 0


def test_scoring_equals_the_update_pass_and_keeps_sample_order() -> None:
    batch = samples()
    policy = Policy(tiny_model("llama", torch.float64))
    updater = Updater(
        policy,
        PolicyGradient(resolve(Learn())),
        resolve(Learn()),
        token_budget=64,
        score_token_budget=20,
        logprob_chunk=3,
        checkpoint_activations=False,
    )
    updater.score(batch, policy, "old_logprobs")
    for sample in batch:
        ids = torch.tensor([[*sample.prompt_tokens, *sample.tokens.tolist()]])
        model = tiny_model("llama", torch.float64)
        logits = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        expected = logits[len(sample.prompt_tokens) - 1 : -1].gather(1, sample.tokens[:, None])[:, 0]
        torch.testing.assert_close(sample.old_logprobs.double(), expected.detach(), atol=1e-5, rtol=0)


def test_launching_is_over_when_the_last_micro_batch_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the device has left is told in micro-batches; of a step's updates the one counts that waited the most."""
    order: list[str] = []
    left = iter([0.5, 0.02, 0.7])

    class Launching:
        def __init__(self, device: torch.device) -> None:
            order.append("begun")

        def end(self) -> None:
            order.append("launched")

        def behind(self, passes: int) -> float:
            order.append(f"asked for {passes}")
            return next(left)

    @contextmanager
    def metered() -> Iterator[None]:
        order.append("metered")
        yield
        order.append("to here")

    learn = resolve(Learn(loss="on_policy", aggregate="token_mean", steps=1))
    sizes = {"token_budget": 20, "score_token_budget": 64, "logprob_chunk": 8, "checkpoint_activations": False}
    updater = Updater(Policy(tiny_model("llama")), PolicyGradient(learn), learn, **sizes, metered=metered)
    backward, step = updater._backward, updater.optimizer.apply
    monkeypatch.setattr(updaters, "Launching", Launching)
    monkeypatch.setattr(updater, "_backward", lambda loss: (order.append("backward"), backward(loss)))
    monkeypatch.setattr(updater.optimizer, "apply", lambda lr: (order.append("optimizer"), step(lr))[1])
    done = [updater.step(samples(), 1e-3, 0.0) for _ in range(3)]
    count = done[0].microbatches
    once = ["begun", *["backward"] * count, "launched", "metered", "optimizer", "to here", f"asked for {count}"]
    assert count > 1 and order == 3 * once
    assert update_metrics(done)["run/device_behind"] == 0.02


def test_recomputing_is_switched_off_again() -> None:
    policy = Policy(tiny_model())
    updater = Updater(
        policy,
        PolicyGradient(resolve(Learn())),
        resolve(Learn()),
        token_budget=64,
        score_token_budget=64,
        logprob_chunk=8,
        checkpoint_activations=True,
    )
    assert policy.model.is_gradient_checkpointing
    updater.recompute(False)
    assert not policy.model.is_gradient_checkpointing
