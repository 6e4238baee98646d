"""A causal language model as Trimtab uses it: one packed forward, hidden states out, logits only in chunks.

Guarantee: a model that gets past `Policy(...)` has been run both ways, packed through Trimtab's attention and alone through
transformers' own, on its real weights, and the log-probs agreed. An architecture that this path cannot serve is refused by
name before anything is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch.autograd.graph import save_on_cpu
from transformers import AutoModelForCausalLM

from trimtab.base.errors import ModelError
from trimtab.config.schema import Model
from trimtab.model.activation_offload import ActivationOffload
from trimtab.model.attention import ATTENTION_NAME, AttentionPlan
from trimtab.model.codes import parameter_elements
from trimtab.model.context import NOISY, context_of, nearest_served
from trimtab.model.experts import add_expert_gradients_to, use_grouped_experts
from trimtab.model.gradients import Gradients
from trimtab.model.head import Head
from trimtab.model.keep import Keep
from trimtab.model.latent import let_plans_see_latents
from trimtab.model.load import building, load_config, refuse_unsupported
from trimtab.model.memory import is_out_of_memory
from trimtab.model.packed import PackedPlan
from trimtab.model.recurrent import has_mixers, let_plans_mix
from trimtab.model.routing import Routers
from trimtab.model.sequence import SequenceGroup
from trimtab.model.shapes import layer_shapes
from trimtab.model.transfer import HostMemory
from trimtab.model.weights import Unit, WeightStore

PROBE_LENGTHS = [7, 12]
PROBE_CUT = [4, 3, 5, 7]
"""The same two, each as a prompt and what follows it."""
OWN_MODULES = "the model's own modules"
TOLERANCE_NATS = {torch.float64: 1e-5, torch.float32: 2e-3, torch.bfloat16: 0.35, torch.float16: 0.1}
"""How far two forward passes that should give the same log-probs may be apart (`distance`), by the type they compute in.
transformers' own attention takes its softmax in float32, whatever the type."""


class PackedForward(Protocol):
    """A forward pass of packed rows (fused.py)."""

    def __call__(
        self, tokens_T: torch.Tensor, positions_T: torch.Tensor, longest: int, plan: AttentionPlan
    ) -> torch.Tensor: ...

    def forget(self) -> None:
        """Keep nothing of where the weights were."""


class Policy:
    """The trained model and, at the same time, the engine's: there is one set of weights."""

    def __init__(self, model: Any, *, check: bool = True, shards: int = 1) -> None:
        """`shards`: ranks that cut its units into equal parts."""
        self.model, self._shards = model, shards
        self.config = model.config.get_text_config()
        refuse_unsupported(model, self.name, self.config)
        self.body = model.get_decoder()
        self.weights = self._make_store()
        """Where the parameters lie."""
        _disable_dropout(model)
        model.set_attn_implementation(ATTENTION_NAME)
        let_plans_mix(self.body)
        let_plans_see_latents(self.body)
        use_grouped_experts(model)
        self.routers = Routers(model)
        """Of a mixture; none elsewhere."""
        self.head = self._head()
        self.description = OWN_MODULES
        """How packed rows run, and why not faster, in words for the user."""
        self.fused_forward: PackedForward | None = None
        """What runs packed rows in the place of the model's modules; chosen in kernel_choice.py."""
        self.keep = Keep.ALL
        self.activation_offload: ActivationOffload | None = None
        """Where the inputs of layers wait for the backward pass; None: on the device."""
        self.gradients: Gradients | None = None
        """Where gradients of half-precision parameters add up, where the policy is trained."""
        self.before_layer: Callable[[int], None] = lambda _: None
        """What a layer waits for, by its number: weights that arrive while others run."""
        self.sequence: SequenceGroup | None = None
        """Ranks that run the same rows, each its own tokens; None: this one runs whole rows."""
        self.layer_done: Callable[[int], None] | None = None
        """Called in a backward pass with the number of a layer whose gradients are complete."""
        if check:
            self._check_packing()
        model.train()

    @property
    def name(self) -> str:
        return type(self.model).__name__

    @property
    def device(self) -> torch.device:
        return self.head.weight_VE.device

    @property
    def dtype(self) -> torch.dtype:
        return self.head.weight_VE.dtype

    @property
    def fused(self) -> bool:
        """Packed rows run through fused layers."""
        return self.fused_forward is not None

    @property
    def tiled_head(self) -> bool:
        """Log-probs come from kernels that store no logits."""
        return self.head.tiled

    @property
    def context_tokens(self) -> int:
        """Longest sequence the model has positions for."""
        return context_of(self.config)

    def present(self) -> AbstractContextManager[None]:
        """While it is used, the policy is on its device; this one always is."""
        return nullcontext()

    def parameters(self) -> list[torch.nn.Parameter]:
        """Trainable parameters; tied ones once."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def parameter_count(self) -> int:
        return parameter_elements(self.model)

    def hidden(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """Last hidden state of every token of one packed row, [T, E]."""
        if self.fused_forward is not None and isinstance(plan, PackedPlan):
            return self.fused_forward(tokens_T, positions_T, plan.longest, plan)
        return self._modules(tokens_T, positions_T, plan).squeeze(0)

    def _modules(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        """The same through the model's own modules, [1, T, E]."""
        away = self.activation_offload is not None and torch.is_grad_enabled()
        with save_on_cpu(pin_memory=self.device.type == "cuda") if away else nullcontext():
            out = self.body(
                input_ids=tokens_T[None],
                position_ids=positions_T[None],
                attention_mask=None,
                use_cache=False,
                attention_plan=plan,
            )
        hidden: torch.Tensor = out.last_hidden_state
        return hidden

    def add_gradients_to(self, gradients: Gradients) -> None:
        """From now on products may add gradients of half-precision parameters to these sums themselves."""
        self.gradients = gradients
        add_expert_gradients_to(self.model, gradients)

    def offload_activations(self, away: bool) -> None:
        """From the next pass on the inputs of layers wait in host memory for the backward pass, or stay on the device."""
        self.activation_offload = ActivationOffload(self.device) if away else None

    def when_layer_is_done(self, call: Callable[[int], None]) -> None:
        """From now on `call` is told, in backward passes, which layer's gradients are complete."""
        self.layer_done = call
        for index, layer in enumerate(getattr(self.body, "layers", [])):
            layer.register_forward_pre_hook(
                lambda _, args, kwargs, index=index: self.watch_input(_hidden_of(args, kwargs), index), with_kwargs=True
            )

    def watch_input(self, hidden: torch.Tensor | None, layer: int) -> None:
        """Have `layer_done` called when the gradient of a layer's input is there."""
        call = self.layer_done
        if call is not None and hidden is not None and hidden.requires_grad:
            hidden.register_hook(lambda _: call(layer))

    def keep_for_backward(self, keep: Keep) -> None:
        """From the next pass on keep so much for the backward pass; the rest is computed again."""
        self.keep = keep
        if keep is not Keep.ALL:
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False, "preserve_rng_state": False}
            )
        elif self.model.is_gradient_checkpointing:
            self.model.gradient_checkpointing_disable()

    @torch.no_grad()
    def load_parameter(self, name: str, value: torch.Tensor) -> None:
        """Make a parameter what it was."""
        self.weights.parameters[name].copy_(value)

    def lay_out_weights(self) -> WeightStore:
        """Where the parameters lie; laid out anew where some were added or put elsewhere."""
        if not self.weights.is_of(self.model):
            self.weights = self._make_store()
        return self.weights

    def _make_store(self) -> WeightStore:
        return WeightStore(self.model.named_parameters(), self._shards)

    def forget(self) -> None:
        """Keep nothing of where the weights were: they have been put elsewhere."""
        if self.fused_forward is not None:
            self.fused_forward.forget()

    @torch.no_grad()
    def probe(self, plan: PackedPlan | None = None) -> torch.Tensor:
        """Log-probs of two short sequences in one row; with a plan, in the segments that it says."""
        plan = plan or PackedPlan(PROBE_LENGTHS, self.device)
        hidden = self.hidden(torch.cat(self._probe_rows()), plan.positions, plan)
        return self.head.logits(hidden).log_softmax(-1)

    def _probe_rows(self) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        rows = [
            torch.randint(0, self.config.vocab_size, (n,), generator=generator, device="cpu") for n in PROBE_LENGTHS
        ]
        return [row.to(self.device) for row in rows]

    def _head(self) -> Head:
        linear = self.model.get_output_embeddings()
        if linear is None or not isinstance(linear, torch.nn.Linear):
            raise ModelError(f"{self.name} has no linear output head that Trimtab can compute log-probs from.")
        scale = float(getattr(self.config, "logit_scale", None) or 1.0)
        scale /= float(getattr(self.config, "logits_scaling", None) or 1.0)
        scale *= float(getattr(self.config, "lm_head_multiplier", None) or 1.0)
        return Head(linear.weight, linear.bias, scale, getattr(self.config, "final_logit_softcapping", None))

    @torch.no_grad()
    def look_at_layers(self) -> None:
        """Refuse an architecture by what its layers ask of attention: on the meta device before any weight is read."""
        with self._told_apart():
            layer_shapes(self)
        if self.config.model_type in NOISY:
            raise ModelError(
                f"{self.name} draws its experts by chance while it is trained, so what is sampled would not be what is learned "
                f"from. {self._nearest}"
            )

    @property
    def _nearest(self) -> str:
        return nearest_served(self.config.model_type)

    @contextmanager
    def _told_apart(self) -> Iterator[None]:
        """What an architecture's own code raises says that it cannot be served; memory that runs out does not, nor does a model
        without weights where values are asked for."""
        try:
            yield
        except (ModelError, AssertionError, TypeError, RuntimeError) as error:
            if is_out_of_memory(error):
                raise
            if self.device.type != "meta" or not isinstance(error, RuntimeError):
                raise ModelError(
                    f"{self.name} cannot run through Trimtab's attention: {error}. {self._nearest}"
                ) from error

    @torch.no_grad()
    def _check_packing(self) -> None:
        """Two short sequences packed must give the log-probs that each gives alone in transformers' eager attention."""
        self.model.eval()
        self.look_at_layers()
        with self._told_apart():
            self.model.train()
            trained = self.probe()
            self.model.eval()
            packed = [self.probe()]
            if has_mixers(self.body):  # a prompt's state is handed to its samples
                packed.append(self.probe(PackedPlan(PROBE_CUT, self.device, prefixes=[None, 0, None, 2])))
        self.model.set_attn_implementation("eager")
        use_grouped_experts(self.model, False)
        alone = [self.model(input_ids=row[None], use_cache=False).logits[0] for row in self._probe_rows()]
        self.model.set_attn_implementation(ATTENTION_NAME)
        use_grouped_experts(self.model)
        expected = torch.cat(alone).to(packed[0].dtype).log_softmax(-1)
        worst = max((distance(found, expected) for found in packed), key=lambda gap: (math.isnan(gap), gap))
        if math.isnan(worst):
            named = [name for name, weight in self.model.named_parameters() if not torch.isfinite(weight).all()]
            where = f"{named[0]} holds values that are not finite" if named else "its weights overflow"
            raise ModelError(f"{self.name} computes log-probs that are NaN: {where}.")
        if not (noise := distance(trained, packed[0])) <= TOLERANCE_NATS[self.dtype]:
            raise ModelError(
                f"{self.name} computes other log-probs while it is trained (off by {noise:.3g} nats): its layers add noise then, "
                f"so what is sampled would not be what is learned from. {self._nearest}"
            )
        if not worst <= TOLERANCE_NATS[self.dtype]:
            raise ModelError(
                f"{self.name} computes different log-probs when sequences are packed (off by {worst:.3g} nats, allowed "
                f"{TOLERANCE_NATS[self.dtype]:g} in {str(self.dtype).removeprefix('torch.')}). Its attention or its head does "
                "something that transformers' attention interface does not pass on, so Trimtab would train it wrongly."
            )


def _hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The hidden states that a layer is called with."""
    found = args[0] if args else kwargs.get("hidden_states")
    return found if isinstance(found, torch.Tensor) else None


class WithoutAdapters:
    """The model without its adapters: their reference policy, which costs no memory."""

    def __init__(self, policy: Policy) -> None:
        self._policy, self.head = policy, policy.head
        self.sequence: SequenceGroup | None = None

    def present(self) -> AbstractContextManager[None]:
        return nullcontext()

    def hidden(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        with self._policy.model.disable_adapter():
            return self._policy.hidden(tokens_T, positions_T, plan)


class FromHost:
    """A policy without gradients whose weights wait in host memory and are on the device only while it is `present`.

    They arrive in the order in which they are used, while the layers whose weights are there already run.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy, self.head, self._device = policy, policy.head, policy.device
        self.sequence: SequenceGroup | None = None
        layers = list(getattr(policy.body, "layers", []))
        self._units = _in_order_of_use(policy.weights, layers)
        self._needed = [sum(at <= index + 1 for at, _ in self._units) for index in range(len(layers))]
        """By layer: how many units are there when it runs. Fused layers end with the norm that the next one begins with."""
        self._memories: list[HostMemory] = []
        self._homes: list[torch.Tensor] = []
        """By unit: its weights in host memory."""
        for _, unit in self._units:
            flat = policy.weights.flats[unit.name]
            self._memories.append(HostMemory(flat.nbytes, flat.device))
            self._homes.append(self._memories[-1].tensor(tuple(flat.shape), flat.dtype).copy_(flat))
            policy.weights.put(unit, self._homes[-1])
        self._inward = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._arrived: list[torch.cuda.Event] = []
        """By unit."""
        policy.before_layer = self._wait_for
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, index=index: self._wait_for(index))
        policy.forget()

    @contextmanager
    def present(self) -> Iterator[None]:
        # Of the stream that uses them, or the allocator would keep them for copying alone.
        places = [torch.empty_like(home, device=self._device) for home in self._homes]
        if self._inward is not None:
            self._inward.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._inward):
            for place, home in zip(places, self._homes):
                place.copy_(home, non_blocking=True)
                if self._inward is not None:
                    self._arrived.append(self._inward.record_event())
        self._put(places)
        try:
            yield
        finally:
            if self._inward is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._inward)
            self._arrived = []
            self._put(self._homes)
            self._policy.forget()

    def hidden(self, tokens_T: torch.Tensor, positions_T: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        self._wait_for(0)
        return self._policy.hidden(tokens_T, positions_T, plan)

    def _wait_for(self, layer: int) -> None:
        """Have the device wait for what a layer reads."""
        if self._arrived:
            torch.cuda.current_stream(self._device).wait_event(self._arrived[self._needed[layer] - 1])

    def _put(self, flats: list[torch.Tensor]) -> None:
        for (_, unit), flat in zip(self._units, flats):
            self._policy.weights.put(unit, flat)


def _in_order_of_use(weights: WeightStore, layers: list[torch.nn.Module]) -> list[tuple[int, Unit]]:
    """The units, each with the number of the first layer that reads it; what all layers read, or none, comes first."""
    owner = {id(p): index for index, layer in enumerate(layers) for p in layer.parameters()}
    found = []
    for unit in weights.units:
        readers = {owner.get(id(weights.parameters[entry.name])) for entry in unit.entries}
        (only,) = readers if len(readers) == 1 else (None,)
        found.append((-1 if only is None else only, unit))
    return sorted(found, key=lambda pair: pair[0])


AnyPolicy = Policy | WithoutAdapters | FromHost


def refuse_other_layers(model: Model) -> None:
    """Refuse an architecture that `Policy(...)` would refuse, as far as that is known without its weights."""
    config = load_config(model)
    # In bfloat16, for which the products of experts are defined without values, too.
    with building(model, config), torch.device("meta"):
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=model.trust_remote_code)
    Policy(made, check=False).look_at_layers()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The worst token's difference in nats, weighted by probability: improbable words are the noisiest and matter least."""
    return float(((found - expected).abs() * expected.exp()).sum(-1).max())


def _disable_dropout(model: torch.nn.Module) -> None:
    """Sampling and training must see the same function, so there is no dropout in RL, nor noise before a router."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and (
                "dropout" in name or name == "jitter_noise"
            ):  # handed to a function in forward
                setattr(module, name, 0.0)
