"""The whole configuration: model, data, reward, environment, learn, run, eval, observe. Importable without torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trimtab.config.base import Count, PositiveInt, Section
from trimtab.config.learn import Drawing, Learn
from trimtab.config.run import Run

Normalize = Literal["none", "group", "step"]


class Lora(Section):
    """Low-rank adapters: they are trained, the model's own weights are frozen."""

    r: PositiveInt = 16
    """Rank. More learns more; it hardly matters for memory, which goes into activations and frozen weights."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The adapters' output is multiplied by alpha / r. None: 2 r."""
    targets: list[str] | Literal["all-linear"] = "all-linear"
    """Linear layers that get an adapter, by the end of their names (q_proj). all-linear: all but the output head."""


class Model(Section):
    """The policy to train."""

    path: str
    """Hub name, local folder, or a GGUF file."""
    tokenizer: str | None = None
    """Hub name or folder of the tokenizer; None: the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Type of the working weights. float16: with loss scaling, for GPUs without bfloat16. auto: bfloat16 on CUDA, float16
    where a GPU has no bfloat16 (both with float32 master weights), float32 on CPU."""
    base: Literal["auto", "bf16", "fp8", "4bit"] = "auto"
    """How the frozen weights under adapters are stored; it changes what is learned a little. fp8: 8 bits (e4m3) with a scale for
    each 128 x 128. 4bit: NF4 with a scale for each 64. Embedding, norms, head and adapters are left alone. bf16: as model.dtype
    says. auto: as the checkpoint stores them."""
    kv_dtype: Literal["auto", "bf16", "fp8"] = "auto"
    """How the native engine stores keys and values. fp8: e4m3 with a scale for each head of each token, half the memory of
    bfloat16; what is sampled then differs from what is trained, which learn.importance can correct. auto: as model.dtype."""
    lora: Lora | None = None
    """Train adapters instead of the weights: {r: 16}. None: train the weights."""
    trust_remote_code: bool = False
    """Run modelling code that comes with the checkpoint."""


class Data(Section):
    """Prompts, and the columns that rewards need."""

    train: str
    """A JSONL, JSON, CSV or Parquet file; `task:NAME` for a built-in task (`task:arithmetic`); `reasoning_gym:NAME`;
    or the name of a Hugging Face data set (`openai/gsm8k:main`)."""
    eval: str | None = None
    """The same, for evaluation. None: no evaluation."""
    prompt: str = "prompt"
    """Column with the prompt: a string, or a list of {role, content} messages."""
    task: str | None = None
    """Column with the name of the row's task. Rewards, lengths, KL and evaluation are then reported for each task, too."""
    system: str | None = None
    """System message put before every prompt."""
    suffix: str = ""
    """Text added to the end of every prompt, or of its last user message: an answer format, for example."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """auto: apply the tokenizer's chat template when it has one. never: string prompts are used as they are."""
    max_prompt_tokens: PositiveInt | None = None
    """Prompts longer than this are left out, counted and reported; they are never cut. None: what the model's context leaves
    after learn.max_new_tokens."""
    limit: PositiveInt | None = None
    """Use only the first rows of the training set."""
    train_split: str = "train"
    """Split of a Hugging Face data set to train on."""
    eval_split: str = "test"
    """Split of a Hugging Face data set to evaluate on."""
    shuffle: bool = True
    """Draw prompts in an order that depends on learn.seed and the epoch; false: in file order."""
    curriculum: Literal["none", "pass_rate"] = "none"
    """pass_rate: a prompt of whose samples a share p succeeded the last time is kept at its next turn with probability
    max(1/8, 4 p (1 - p)), so those that are always or never solved come less often. eval.part and eval.threshold say what
    succeeds."""
    options: dict[str, Any] = {}
    """Options of a built-in or reasoning_gym task: difficulty, size, and the task's own."""


class RewardPart(Section):
    """One part of the reward. The weighted sum of all parts is a sample's reward."""

    fn: str
    """`file.py:function`, `package.module:function`, `model:FOLDER` for a reward model, `environment` for what the
    environment gave, or a built-in: exact_match, number_match, regex, length, math, task, judge."""
    name: str | None = None
    """Name in metrics; None: the function's name."""
    weight: float = 1.0
    """Factor in the sum."""
    normalize: Normalize = "none"
    """Before weighting, replace the part's values by their z-scores, (value - mean) / std: among the samples of the same prompt
    (group) or of the whole step (step). Parts of different units and spreads then weigh what `weight` says. none: as they are."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Deadline of one call. A call that misses it is ended; its samples are dropped and counted, never scored zero. For a judge:
    of one completion, all its tries and waits together."""
    args: dict[str, Any] = {}
    """Keyword arguments for every call (built-ins document theirs)."""


class Environment(Section):
    """What answers the model, so that a completion becomes a conversation. Only the model's own tokens are learned."""

    fn: str | None = None
    """A class with `reset` and `step`: `file.py:Class` or `package.module:Class`. None: `tools` answer."""
    tools: list[str] = []
    """Functions that the model may call: `file.py:function`, `package.module:function`, or the built-in `calculator`. The chat
    template shows the model their types and docstrings."""
    max_turns: PositiveInt = 8
    """Most turns of the model. After the last one the environment still judges it, but its reply is not read."""
    timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Deadline of one call. A completion whose environment misses it, raises or crashes is dropped and counted, never scored
    zero."""
    args: dict[str, Any] = {}
    """Keyword arguments of the class in `fn`."""


class EvalSampling(Drawing):
    """How evaluation draws tokens. By default it is greedy, and completions end as in training."""

    temperature: Annotated[float, Field(ge=0)] = 0.0
    """Softmax temperature; 0 is greedy. Not inherited from training, nor are top_k, top_p and min_p."""
    stop: list[Annotated[str, Field(min_length=1)]] | None = None
    """Strings that end a completion. None: learn.sampling.stop; [] for none."""
    stop_token_ids: list[Count] | None = None
    """Token ids that end a completion, besides the model's own end-of-sequence ids. None: learn.sampling.stop_token_ids; [] for
    none."""


class Eval(Section):
    """How held-out accuracy is measured."""

    samples_per_prompt: PositiveInt = 1
    """Completions for each evaluation prompt; pass@k is reported for k = 1, 2, 4, ... up to this."""
    sampling: EvalSampling = EvalSampling()
    max_new_tokens: PositiveInt | None = None
    """Longest completion; None: learn.max_new_tokens."""
    limit: PositiveInt | None = None
    """Use only the first rows of the evaluation set."""
    part: str | None = None
    """Reward part that decides success; None: the first."""
    threshold: float | None = None
    """A completion succeeds when that part is at least this. None: 1; a reward model's scores have no natural threshold, so
    its mean score (`eval/score`) is reported in place of pass@k."""


class Observe(Section):
    """Where results go and how often."""

    dir: str = "runs/{name}-{time}"
    """Run folder. {name} is the config file's name, {time} the start time."""
    eval_every: Count = 0
    """Evaluate every this many steps, and before the first and after the last; 0: only before and after."""
    checkpoint_every: Count = 50
    """Write a checkpoint every this many steps, and after the last; 0: only after the last."""
    keep_checkpoints: PositiveInt = 2
    """How many of the newest checkpoints are kept. The best by evaluation is kept, too."""
    samples_every: Count = 10
    """Write sample completions every this many steps; 0: never."""
    samples_rows: PositiveInt = 32
    """Most completions in a file of samples: of the best, the worst and random groups, and some that failed."""
    report: bool = True
    """Write RUN/report.html at the end of the run, however it ends."""
    tensorboard: bool = True
    """Write TensorBoard events into the run folder."""
    wandb: str | None = None
    """Weights & Biases project to log to; needs trimtab[wandb]. The report is attached at the end."""
    trackio: str | None = None
    """trackio project to log to, on this machine; needs trimtab[trackio]. The report is attached at the end."""
    prometheus: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port at which Prometheus can read the last row while the run trains, as http://HOST:PORT/metrics; needs trimtab[serve]."""
    prometheus_host: str = "127.0.0.1"
    """Address that this port is opened at; 0.0.0.0 for a Prometheus on another machine."""
    max_failed_rewards: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Stop the run when more than this fraction of a step's samples has no reward because reward calls, or its
    environment, failed."""
    kl_bands: dict[str, tuple[float, float]] = {}
    """By task: the lowest and the highest KL to the reference, in nats per token, that is healthy. `trimtab doctor RUN`
    reports a task outside its band."""


class Config(Section):
    """A run: what to learn (`model`, `data`, `reward`, `environment`, `learn`), how to run it (`run`), how to see it (`eval`,
    `observe`)."""

    model: Model
    data: Data
    reward: Annotated[list[RewardPart], Field(min_length=1)]
    environment: Environment | None = None
    learn: Learn = Learn()
    run: Run = Run()
    eval: Eval = Eval()
    observe: Observe = Observe()
