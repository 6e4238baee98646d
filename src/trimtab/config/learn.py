"""`learn`: everything that changes what is learned. These keys are the user's; Trimtab never changes one by itself."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trimtab.config.base import Auto, Count, Fraction, PositiveInt, Section, Seed

Algorithm = Literal[
    "grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "ppo"
]
AdvantageName = Literal[
    "group_std",
    "group_mean",
    "leave_one_out",
    "batch_mean",
    "global_norm",
    "group_mean_global_norm",
    "group_mean_global_std",
    "group_mean_batch_std",
    "gae",
]
LossName = Literal["clip", "sequence_clip", "gspo", "cispo", "on_policy"]
AggregateName = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


class Drawing(Section):
    """How a token is drawn from the model's distribution. Training and evaluation each have their own."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Softmax temperature; log-probs in training use the same one. 0 is greedy and only makes sense for evaluation."""
    top_k: Count = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: Fraction = 1.0
    """Keep the smallest set of tokens whose probability reaches this; 1 keeps all."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Drop tokens less probable than this fraction of the most probable one; 0 keeps all."""


class Sampling(Drawing):
    """How tokens are drawn. Sampling is keyed by (seed, step, prompt, sample, position), never by batch shape."""

    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a completion. The tokens up to and including the one that completes the string are kept."""
    stop_token_ids: list[Count] = []
    """Token ids that end a completion, besides the model's own end-of-sequence ids."""


class Clip(Section):
    """Bounds of the policy ratio in one update."""

    low: Annotated[float, Field(ge=0)] | Auto = "auto"
    """The ratio is kept above 1 - low. auto: 0.2; GSPO 3e-4; CISPO has no lower bound."""
    high: Annotated[float, Field(ge=0)] | Auto = "auto"
    """The ratio is kept below 1 + high. auto: 0.2; DAPO 0.28; GSPO 4e-4; CISPO 5.0. Above `low` it loosens the clip."""
    dual: Annotated[float, Field(gt=1)] | None = None
    """Dual clip: for negative advantages the objective is kept above dual times the advantage. None: off."""


class KL(Section):
    """Penalty for moving away from the reference policy (the model as it was before training)."""

    coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the penalty, per nat and token. 0: no reference model is kept at all."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """k1 = log ratio, k2 = half its square, k3 = unbiased and never negative."""
    where: Literal["loss", "reward", "advantage"] = "loss"
    """loss: added to the loss. reward: subtracted from the reward before advantages, so that baselines contain it. advantage:
    subtracted after the baseline, where each token pays for itself and the tokens after it (as OpenRLHF has it)."""
    corrected: bool | Literal["sequence"] = False
    """In the loss: multiply each token's KL by its policy ratio, for k1 and k3 with the ratio's gradient. On average the gradient
    is then that of the KL itself, off policy too (DeepSeek-V3.2); without it k2's is so on policy and k3's near the reference
    only. sequence: multiply by the geometric mean of the sequence's ratios instead (as TRL has it for GSPO)."""
    target: Annotated[float, Field(gt=0)] | None = None
    """Adaptive controller: steer the measured KL (nats per token) to this value by changing `coef` from step to step."""
    horizon: PositiveInt = 10_000
    """Adaptive controller: how many samples a full correction takes."""


class Schedule(Section):
    """Learning rate over the run, the same as Hugging Face's schedules."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine would reach `final` times `learn.lr` one step after the last."""
    warmup_steps: Count = 0
    """Steps over which the rate rises linearly from 0. The first of them has rate 0: nothing is learned from it."""
    final: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Fraction of `learn.lr` that linear and cosine end at."""
    unit: Literal["step", "update"] = "step"
    """What the schedule and `warmup_steps` count. step: rollout-and-update rounds, with one rate for all updates of a round (as
    verl has it). update: optimizer steps (as TRL and OpenRLHF have it)."""


class Optimizer(Section):
    """AdamW."""

    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the first moment."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Decay of the second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, applied to matrices only (not to norms and biases)."""
    states: Literal["full", "8bit"] = "full"
    """How both moments are kept. full: in float32. 8bit: one byte an element with a scale for each 256 (Dettmers et al. 2021), a
    quarter of the memory. Its rounding changes what is learned a little, so it is a key of `learn`."""


class Importance(Section):
    """Truncated importance correction for the difference between the policy that sampled and the one that learns: the engine's
    numerics, and with `learn.staleness` the updates since."""

    level: Literal["off", "token", "sequence"] | Auto = "auto"
    """One weight a token, or one a sequence (the product over its tokens). auto: token where `learn.staleness` is above 0: then
    an older policy has sampled; else off. Also off where the ratio itself is this correction (`learn.old_logprobs: engine`)."""
    cap: Annotated[float, Field(gt=0)] = 2.0
    """Weights above this are lowered to it (truncate), or their tokens are left out (mask)."""
    mode: Literal["truncate", "mask"] = "truncate"
    """What happens above the cap."""


class Overlong(Section):
    """DAPO's soft penalty for completions that come close to `max_new_tokens`."""

    buffer: PositiveInt
    """The penalty grows linearly over the last `buffer` tokens before `max_new_tokens`."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """Subtracted from the reward in full at `max_new_tokens`."""


class DynamicSampling(Section):
    """DAPO's dynamic sampling: groups whose rewards are all equal carry no signal; drop them and draw other prompts."""

    enabled: bool | Auto = "auto"
    """auto: on for DAPO only."""
    max_refills: PositiveInt = 4
    """How many times a step may draw replacement prompts. After that it continues with the groups it has."""


class Critic(Section):
    """PPO's value model. It starts as a copy of a model, reads what the policy reads, and has adapters where the policy has."""

    path: str | None = None
    """Model that the critic starts from: hub name, folder or GGUF file of one with the policy's tokenizer. None: the policy's own
    start."""
    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate; `learn.schedule` is its schedule too."""
    clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Most that a value may move from its old value in one step, if moving further would lower the loss. None: no limit."""
    warmup_steps: Count = 0
    """Steps at the beginning in which only the critic learns."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """GAE's gamma: the factor by which a reward is discounted for each token before it."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """GAE's lambda: 1 uses the rewards that were earned, 0 only what the critic expects of the next token."""


class Learn(Section):
    """What to learn. Two sizes are stated, prompts_per_step and samples_per_prompt; every other batch size is derived."""

    algorithm: Algorithm = "grpo"
    """Chooses advantage, loss and aggregation together; each can be overridden below."""
    steps: PositiveInt = 100
    """Rollout-and-update rounds."""
    seed: Seed = 0
    """Seeds data order and sampling. Two runs with the same config and seed are identical on CPU."""
    prompts_per_step: PositiveInt = 32
    """Different prompts in a step."""
    samples_per_prompt: PositiveInt = 16
    """Completions drawn for each prompt; together they form a group."""
    updates_per_step: PositiveInt = 1
    """Optimizer steps per pass over a step's batch: the batch is split by prompts into this many parts."""
    epochs_per_step: PositiveInt = 1
    """Passes over a step's batch."""
    staleness: Count = 0
    """How many steps old the policy is that samples a step's batch. 0: the one that learns from it. k: that of k steps before,
    exactly and for every token, so that sampling and learning can go on side by side and the result still does not depend on
    timing. Rewards of a batch are then computed while the policy learns from the batch before it. See docs/asynchronous.md."""
    max_new_tokens: PositiveInt = 512
    """Longest completion, in tokens: everything after the prompt, an environment's replies included."""
    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    schedule: Schedule = Schedule()
    optimizer: Optimizer = Optimizer()
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """The gradient of a whole update is scaled down to this norm; None: no clipping."""
    sampling: Sampling = Sampling()
    clip: Clip = Clip()
    kl: KL = KL()
    entropy_coef: float = 0.0
    """Weight of the entropy bonus, per nat and token."""
    router_aux_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of a mixture's balancing loss: for each layer, experts times the sum over them of their share of the step's choices
    and their mean probability, 1 where all are used alike; the mean over layers. Shares are counted for the whole optimizer step
    before its first backward pass, which takes one more forward pass. Biases that some routers add to choose are left as they
    are."""
    router_replay: bool = False
    """Experts that the engine chose for a completion's tokens travel with it, and the trainer uses them: otherwise a token whose
    choice is close may go to other experts there. The router's weights for them, and prompts, are computed as usual. Needs
    `run.engine: native`; see `rollout/router_agreement`."""
    advantage: AdvantageName | Auto = "auto"
    """group_std: (r - group mean) / group std. group_mean: without the division. leave_one_out: against the mean of the
    other samples. batch_mean: against the mean of the step. global_norm: REINFORCE++ (mean and std of all tokens).
    group_mean_global_norm: REINFORCE++-baseline (group mean, then mean and std of all tokens). group_mean_global_std: group mean,
    then the std of what is left over all samples. group_mean_batch_std: group mean, then the std of all rewards. gae: PPO's,
    token by token against a critic, then mean and std of the step. auto: what `algorithm` says."""
    loss: LossName | Auto = "auto"
    """clip: PPO's clipped ratio. sequence_clip: the same with the ratio of the whole completion (RLOO). gspo: with the geometric
    mean of a completion's ratios. cispo: clipped ratio as a constant weight. on_policy: plain policy gradient. auto: what
    `algorithm` says."""
    aggregate: AggregateName | Auto = "auto"
    """token_mean: every token of the step weighs the same. sequence_mean: every sequence weighs the same. sequence_sum: tokens
    are summed over a sequence, sequences averaged. constant: Dr. GRPO's division by max_new_tokens. Counted over the whole step,
    never over a micro-batch. auto: what `algorithm` says."""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """Where the ratio's denominator comes from when a batch is used for more than one update: one extra forward pass, or the
    engine's own log-probs. With one update a step the ratio is 1 by construction and nothing is computed."""
    importance: Importance = Importance()
    critic: Critic = Critic()
    reward_clip: tuple[float, float] | None = None
    """Clip the weighted reward to this range before advantages."""
    overlong: Overlong | None = None
    mask_truncated: bool = False
    """Leave completions that hit max_new_tokens out of the loss (they still count in their group's mean reward)."""
    dynamic_sampling: DynamicSampling = DynamicSampling()

    @property
    def sequences_per_step(self) -> int:
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps taken on one batch of samples; 1 means strictly on-policy."""
        return self.updates_per_step * self.epochs_per_step
