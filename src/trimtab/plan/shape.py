"""A model's sizes, from its config alone: parameters, what a token stores, what a layer computes. No weights, no torch.

Guarantee: for the families in `FAMILIES` the number of parameters is exact (tests compare it with the models themselves). Other
architectures are measured instead, by building them without memory (run/shapes.py), which is as exact and takes seconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from trimtab.base.errors import ModelError
from trimtab.model.context import context_of
from trimtab.model.sequence_way import AttentionSize
from trimtab.plan.mixing import Mixing


@dataclass(frozen=True)
class Block:
    """One decoder layer."""

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    width: int
    """Width of the feed-forward part, or of one expert."""
    parameters: int
    active: int
    """Parameters that one token is multiplied by."""
    window: int | None = None
    gated: bool = True
    head_norm: bool = False
    sandwich: bool = False
    """Norms after attention and feed-forward as well as before."""
    dense: bool = False
    """No fused kernel computes its attention: scores are soft-capped."""
    experts: int = 0
    experts_used: int = 0
    shared_width: int = 0
    """Width of the experts that every token uses, together."""
    mixing: Mixing | None = None
    """What carries a state from token to token, in the place of attention (then there are no heads) or beside it."""
    own_linears: tuple[tuple[str, int, int], ...] | None = None
    """Name, inputs and outputs of its linear layers, where they are not the usual ones."""
    latent: int = 0
    """Elements of the latent that keys and values are made of; 0: they are made of the hidden state."""
    latent_rotated: int = 0
    """Elements of the key that all heads share, beside the latent."""
    query_latent: int = 0
    """Elements of the latent that queries are made of."""

    @property
    def query_width(self) -> int:
        return self.heads * self.head_size

    @property
    def projected(self) -> int:
        """Queries, keys and values together."""
        return self.query_width + self.kv_heads * (self.head_size + self.value_size)

    @property
    def attended(self) -> int:
        return self.heads * self.value_size

    @property
    def kv_elements(self) -> int:
        """Elements of the keys and values of one token."""
        return self.kv_heads * (self.head_size + self.value_size)

    @property
    def stored_elements(self) -> int:
        """Elements that one token stores in an engine: where keys and values are made of a latent, that."""
        return self.latent + self.latent_rotated if self.latent else self.kv_elements

    @property
    def pair_elements(self) -> int:
        """Elements of the hidden size that a token has for its experts: what it is laid
        out as for each of them, and what each makes of it."""
        return 2 * self.experts_used

    def experts_read(self, tokens: float) -> float:
        """Share of the experts that so many tokens use between them, where each is as likely as any other."""
        return 1.0 - (1.0 - self.experts_used / self.experts) ** tokens if self.experts else 1.0

    @property
    def used_width(self) -> int:
        """Width of the feed-forward part as one token sees it."""
        return self.experts_used * self.width + self.shared_width if self.experts else self.width


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only language model."""

    kind: str
    hidden: int
    vocabulary: int
    tied: bool
    blocks: tuple[Block, ...]
    other: int = 0
    """Parameters outside layers, embedding and head: the last norm."""
    context: int = 2**31

    @property
    def layers(self) -> int:
        return len(self.blocks)

    @property
    def table(self) -> int:
        """Parameters of the embedding, and of the head where it has its own."""
        return self.vocabulary * self.hidden

    @cached_property
    def kinds(self) -> Counter[Block]:
        """How many there are of each kind of block."""
        return Counter(self.blocks)

    @cached_property
    def parameters(self) -> int:
        return sum(b.parameters for b in self.blocks) + self.other + self.table * (1 if self.tied else 2)

    @cached_property
    def active_parameters(self) -> int:
        """Parameters that a token is multiplied by: an embedding is read, not multiplied."""
        return sum(b.active for b in self.blocks) + self.other + self.table

    @property
    def attention_sizes(self) -> tuple[AttentionSize, ...]:
        """How the layers attend, kind by kind."""
        return tuple(
            AttentionSize(count, block.heads, block.kv_heads, block.head_size, block.value_size)
            for block, count in self.kinds.items()
        )

    @property
    def has_experts(self) -> bool:
        return any(block.experts for block in self.blocks)

    def parameters_read(self, tokens: float) -> float:
        """Parameters that a pass over so many tokens reads: experts that none of them uses are left alone."""
        if not self.has_experts:
            return min(self.parameters, self.active_parameters * tokens)
        routed = {b: 3 * self.hidden * b.width for b in self.kinds if b.experts}
        always = self.active_parameters - sum(n * routed.get(b, 0) * b.experts_used for b, n in self.kinds.items())
        return always + sum(
            n * routed[b] * b.experts * b.experts_read(tokens) for b, n in self.kinds.items() if b in routed
        )

    @cached_property
    def whole_kv_elements(self) -> int:
        """Elements of the keys and values of one token in all layers."""
        return sum(b.kv_elements for b in self.blocks)

    @cached_property
    def kv_elements(self) -> int:
        """Elements that one token stores in all layers."""
        return sum(b.stored_elements for b in self.blocks)

    def state_bytes(self, itemsize: int) -> int:
        """Bytes that a sequence carries in all layers, whatever its length, beside keys and values."""
        return sum(n * b.mixing.state_bytes(itemsize) for b, n in self.kinds.items() if b.mixing is not None)

    def linears(self, block: Block) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of a block that adapters are put on, by name."""
        if block.own_linears is not None:
            return {name: (inputs, outputs) for name, inputs, outputs in block.own_linears}
        layers = {"self_attn.o_proj": (block.attended, self.hidden)}
        if block.latent:
            made = block.heads * (block.head_size - block.latent_rotated + block.value_size)
            layers["self_attn.kv_a_proj_with_mqa"] = (self.hidden, block.latent + block.latent_rotated)
            layers["self_attn.kv_b_proj"] = (block.latent, made)
            queries = {"self_attn.q_proj": (self.hidden, block.query_width)}
            if block.query_latent:
                queries = {
                    "self_attn.q_a_proj": (self.hidden, block.query_latent),
                    "self_attn.q_b_proj": (block.query_latent, block.query_width),
                }
            return layers | queries
        kv = block.kv_heads * block.head_size, block.kv_heads * block.value_size
        layers["self_attn.q_proj"] = (self.hidden, block.query_width)
        layers |= {"self_attn.k_proj": (self.hidden, kv[0]), "self_attn.v_proj": (self.hidden, kv[1])}
        if not self.has_experts:
            layers |= {"mlp.up_proj": (self.hidden, block.width), "mlp.down_proj": (block.width, self.hidden)}
            layers |= {"mlp.gate_proj": (self.hidden, block.width)} if block.gated else {}
        if self.kind == "qwen2_moe":
            layers["mlp.shared_expert_gate"] = (self.hidden, 1)
        if self.kind == "phi3":  # what reads one input is one layer there
            layers |= {"self_attn.qkv_proj": (self.hidden, block.query_width + sum(kv))}
            layers |= {"mlp.gate_up_proj": (self.hidden, 2 * block.width)}
            parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
            layers = {name: sizes for name, sizes in layers.items() if name not in parts}
        return layers

    def stacks(self, block: Block) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the matrices that each expert of a block has, by the name of the stacked weight."""
        if not block.experts:
            return {}
        return {
            "mlp.experts.gate_up_proj": (self.hidden, 2 * block.width),
            "mlp.experts.down_proj": (block.width, self.hidden),
        }

    def lora_parameters(self, rank: int, targets: Sequence[str] | None = None) -> int:
        """Parameters of adapters on every linear layer of the blocks and on every expert, or on those whose names end with one of
        `targets`."""

        def meant(name: str) -> bool:
            return targets is None or any(f".{name}".endswith(f".{end}") for end in targets)

        total = 0
        for block, count in self.kinds.items():
            chosen = [sizes for name, sizes in self.linears(block).items() if meant(name)]
            stacked = [sizes for name, sizes in self.stacks(block).items() if meant(name)]
            total += count * rank * (sum(map(sum, chosen)) + block.experts * sum(map(sum, stacked)))
        return total


FAMILIES = {
    "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "granite", "mixtral", "qwen3_moe", "gpt_oss",
    "deepseek_v3", "deepseek_v2", "olmoe", "qwen2_moe", "glm4_moe",
}  # fmt: skip


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes; raises KeyError with the family's name for one that is not in `FAMILIES`."""
    config = config.get("text_config") or config
    kind = str(config.get("model_type", ""))
    if kind not in FAMILIES:
        raise KeyError(kind)
    missing = [
        key for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size") if key not in config
    ]
    if missing:
        raise ModelError(f"The model's config lacks {', '.join(missing)}, so Trimtab cannot plan for it.")
    hidden, count = config["hidden_size"], config["num_hidden_layers"]
    return ModelShape(
        kind=kind,
        hidden=hidden,
        vocabulary=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", kind in ("gemma2", "gemma3_text"))),
        blocks=tuple(_block(config, kind, index) for index in range(count)),
        other=hidden,
        context=context_of(config),
    )


def _block(config: Mapping[str, Any], kind: str, index: int) -> Block:
    if kind in ("deepseek_v2", "deepseek_v3"):
        return _latent_block(config, index)
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    plain = Block(
        heads, kv_heads, size, size, config.get("intermediate_size") or 4 * hidden, 0, 0, _window(config, kind, index)
    )
    head_norm = kind in ("qwen3", "qwen3_moe", "gemma3_text", "olmo2") or bool(
        kind == "glm4_moe" and config.get("use_qk_norm")
    )
    capped = kind == "gemma2" and config.get("attn_logit_softcapping", 50.0) is not None
    dense = capped
    block = replace(plain, head_norm=head_norm, sandwich=kind in ("gemma2", "gemma3_text", "olmo2"), dense=dense)
    attention = hidden * (block.projected + block.query_width)
    biased = config.get("attention_bias", kind == "gpt_oss")
    if kind == "qwen2" or (kind == "qwen2_moe" and config.get("qkv_bias", True)):
        attention += block.projected
    elif kind == "glm4_moe":
        attention += block.projected if biased else 0
    elif biased:
        attention += block.projected + hidden
    attention += {"gpt_oss": heads, **dict.fromkeys(("olmo2", "olmoe"), block.query_width + kv_heads * size)}.get(
        kind, 2 * size if head_norm else 0
    )
    norms = (4 if block.sandwich and kind != "olmo2" else 2) * hidden  # OLMo has norms after, and none before
    return _with_feed_forward(block, config, kind, index, attention + norms)


def _with_feed_forward(block: Block, config: Mapping[str, Any], kind: str, index: int, rest: int) -> Block:
    hidden = config["hidden_size"]
    experts = config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 0
    sparse = experts and kind in ("mixtral", "qwen3_moe", "gpt_oss", "olmoe", "qwen2_moe", "glm4_moe")
    if kind in ("qwen3_moe", "qwen2_moe"):
        every = config.get("decoder_sparse_step") or 1
        sparse = sparse and index not in (config.get("mlp_only_layers") or []) and (index + 1) % every == 0
    if kind == "glm4_moe":
        sparse = sparse and index >= config.get("first_k_dense_replace", 0)
    if not sparse:
        dense = 3 * hidden * block.width + (2 * block.width + hidden if config.get("mlp_bias") else 0)
        return replace(block, parameters=rest + dense, active=rest + dense)
    width = config.get("moe_intermediate_size") or block.width
    used, shared = config.get("num_experts_per_tok") or 1, 0
    if kind == "qwen2_moe":
        shared = config["shared_expert_intermediate_size"]
        rest += hidden  # its gate
    elif kind == "glm4_moe":
        shared = (config.get("n_shared_experts") or 0) * width
    rest += 3 * hidden * shared
    one = 3 * hidden * width + (2 * width + hidden if kind == "gpt_oss" else 0)
    router = experts * (hidden + (1 if kind == "gpt_oss" else 0))
    return replace(
        block, width=width, experts=experts, experts_used=used, shared_width=shared,
        parameters=rest + router + experts * one, active=rest + router + used * one,
    )  # fmt: skip


def _latent_block(config: Mapping[str, Any], index: int) -> Block:
    """Multi-head latent attention."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    rotated, plain = config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    value, latent, query_latent = config["v_head_dim"], config["kv_lora_rank"], config.get("q_lora_rank")
    size = rotated + plain
    queries = hidden * heads * size if query_latent is None else query_latent * (hidden + 1 + heads * size)
    keys = hidden * (latent + rotated) + latent + latent * heads * (plain + value)
    rest = queries + keys + heads * value * hidden + 2 * hidden
    block = Block(
        heads, heads, size, value, config["intermediate_size"], 0, 0, latent=latent, latent_rotated=rotated,
        query_latent=query_latent or 0,
    )  # fmt: skip
    if index < config.get("first_k_dense_replace", 0):
        dense = 3 * hidden * block.width
        return replace(block, parameters=rest + dense, active=rest + dense)
    width, experts = config["moe_intermediate_size"], config["n_routed_experts"]
    used, shared = config["num_experts_per_tok"], config.get("n_shared_experts") or 0
    always = rest + experts * hidden + shared * 3 * hidden * width
    return replace(
        block, width=width, experts=experts, experts_used=used, shared_width=shared * width,
        parameters=always + experts * 3 * hidden * width, active=always + used * 3 * hidden * width,
    )  # fmt: skip


def _window(config: Mapping[str, Any], kind: str, index: int) -> int | None:
    window = config.get("sliding_window")
    if not window:
        return None
    kinds = config.get("layer_types")
    if kinds:
        return window if kinds[index] == "sliding_attention" else None
    if kind == "gemma2":
        return window if index % 2 == 0 else None
    if kind == "gemma3_text":
        return window if (index + 1) % (config.get("sliding_window_pattern") or 6) else None
    if kind == "gpt_oss":
        return window if index % 2 == 0 else None
    if kind in ("qwen2", "qwen3", "qwen3_moe"):
        first = config.get("max_window_layers", 0)
        return window if config.get("use_sliding_window") and index >= first else None
    return int(window)
