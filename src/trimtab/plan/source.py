"""What a config file alone says of a run's work: the model's config.json, the lengths that the config states; no weights.

A hub name is looked up among the well-known models below, then in the local cache and on the hub.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trimtab.base.errors import ConfigError, ModelError, Problem, first_line
from trimtab.base.suggestions import is_local
from trimtab.config.load import AnyConfig
from trimtab.config.resolved import eval_max_new_tokens
from trimtab.config.reward_model import RewardModelConfig
from trimtab.config.schema import Config
from trimtab.model.context import SERVED_LAYERS
from trimtab.model.names import near_models
from trimtab.model.schemes import read_scheme
from trimtab.plan.quantised import refuse_base
from trimtab.plan.shape import FAMILIES, ModelShape, read_shape
from trimtab.plan.work import Lengths

ITEMSIZE = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
ASSUMED_PROMPT_TOKENS = 256
"""Tokens of a prompt where the config does not say."""
ASSUMED_EXAMPLE_TOKENS = 2048
"""Tokens of an SFT example or an answer where the config does not say."""


def _known(kind: str, rows: str, **common: Any) -> dict[str, dict[str, Any]]:
    """Configs by name, from a line each: name hidden width layers heads kv_heads vocabulary tied."""
    found = {}
    for row in rows.strip().splitlines():
        name, *numbers = row.split()
        keys = (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
        )
        found[name.lower()] = dict(zip(keys, map(int, numbers))) | {
            "model_type": kind, "tie_word_embeddings": numbers[6] == "1", **common,
        }  # fmt: skip
    return found


WELL_KNOWN: dict[str, dict[str, Any]] = {
    **_known("qwen2", """
        Qwen2.5-0.5B 896 4864 24 14 2 151936 1
        Qwen2.5-1.5B 1536 8960 28 12 2 151936 1
        Qwen2.5-3B 2048 11008 36 16 2 151936 1
        Qwen2.5-7B 3584 18944 28 28 4 152064 0
        Qwen2.5-14B 5120 13824 48 40 8 152064 0
        Qwen2.5-32B 5120 27648 64 40 8 152064 0
        Qwen2.5-72B 8192 29568 80 64 8 152064 0"""),
    **_known("qwen3", """
        Qwen3-0.6B 1024 3072 28 16 8 151936 1
        Qwen3-1.7B 2048 6144 28 16 8 151936 1
        Qwen3-4B 2560 9728 36 32 8 151936 1
        Qwen3-8B 4096 12288 36 32 8 151936 0
        Qwen3-14B 5120 17408 40 40 8 151936 0
        Qwen3-32B 5120 25600 64 64 8 151936 0""", head_dim=128),
    **_known("llama", """
        SmolLM2-135M 576 1536 30 9 3 49152 1
        SmolLM2-360M 960 2560 32 15 5 49152 1
        SmolLM2-1.7B 2048 8192 24 32 32 49152 1
        Llama-3.2-1B 2048 8192 16 32 8 128256 1
        Llama-3.2-3B 3072 8192 28 24 8 128256 1
        Llama-3.1-8B 4096 14336 32 32 8 128256 0
        Llama-3.1-70B 8192 28672 80 64 8 128256 0
        Llama-3.3-70B 8192 28672 80 64 8 128256 0"""),
    **_known("mistral", "Mistral-7B-v0.3 4096 14336 32 32 8 32768 0"),
}  # fmt: skip


def described_shape(path: str) -> ModelShape | None:
    """The shape of the model that `model.path` names, by its config alone; None where the model has to be built to know it."""
    config = _config_json(path)
    if config is None:
        known = _well_known(path)
        return None if known is None else read_shape(known)
    kind = config.get("model_type")
    if stored_codes(path) != "4bit":
        read_scheme(path, config)
    if kind not in FAMILIES or _unusual(config):
        return None
    try:
        return read_shape(config)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{path}: config.json does not describe a {kind} model: {type(error).__name__}: {error}."
        ) from None


def _unusual(config: dict[str, Any]) -> bool:
    """A run may refuse it, though its family is known: transformers is asked then."""
    other_layers = set(config.get("layer_types") or []) - SERVED_LAYERS
    return bool(config.get("text_config") or other_layers)


def stored_as(path: str) -> str | None:
    """How the weights are stored that `model.path` names, in words, where they are dequantised on loading."""
    config = _config_json(path)
    scheme = None if config is None else read_scheme(path, config) or read_scheme(path, config.get("text_config") or {})
    return None if scheme is None else scheme.words


def is_quantised(path: str) -> bool:
    """The weights that `model.path` names are stored in fewer bits, in a way that is read."""
    return stored_codes(path) == "4bit" or stored_as(path) is not None


def stated_dtype(config: AnyConfig, cpu: bool) -> str:
    """The type of the weights, as model/load.py chooses it."""
    return ("float32" if cpu else "bfloat16") if config.model.dtype == "auto" else config.model.dtype


def stored_codes(path: str) -> str:
    """How the checkpoint of a path stores the weights of layers: plain, fp8 or 4bit."""
    config = _config_json(path) or {}
    settings = {} if config.get("text_config") else config.get("quantization_config") or {}
    if settings.get("quant_method") == "bitsandbytes":
        return "4bit" if settings.get("load_in_4bit") or settings.get("_load_in_4bit") else "plain"
    return "fp8" if settings.get("quant_method") == "fp8" else "plain"


def widened_from(config: AnyConfig, other: bool) -> str | None:
    """How the weights are stored, in words, where they are dequantised on loading and not kept in their codes under adapters.
    `other`: the model's layers are not plain linear ones (`has_other_layers`), and never kept so."""
    model = config.model
    codes = "plain" if other else stored_codes(model.path)
    if codes != "plain" and model.lora is not None and model.base in ("auto", codes):
        return None
    return "4 bits (bitsandbytes)" if codes == "4bit" else stored_as(model.path)


def stated_lengths(config: AnyConfig, shape: ModelShape) -> Lengths:
    """The lengths that a config states, before the data is read."""
    held_out = config.data.eval is not None
    if not isinstance(config, Config):
        answers = 2 if isinstance(config, RewardModelConfig) else 1  # both of a pair are in one micro-batch
        longest = answers * min(shape.context, config.learn.max_tokens or ASSUMED_EXAMPLE_TOKENS)
        return Lengths(longest, longest, int(held_out))
    learn = config.learn
    new = max(learn.max_new_tokens, eval_max_new_tokens(config) if held_out else 0)
    room = shape.context - new
    if room < 1:
        what = f"{new} leaves no room for a prompt in the model's context of {shape.context} tokens"
        key = "learn.max_new_tokens" if new == learn.max_new_tokens else "eval.max_new_tokens"
        raise ConfigError([Problem(key, what, "Lower it.")])
    prompt = min(room, config.data.max_prompt_tokens or ASSUMED_PROMPT_TOKENS)
    return Lengths(prompt, prompt, (config.eval.limit or 1) if held_out else 0)


def stated_adapters(config: AnyConfig, shape: ModelShape) -> int:
    """Parameters of the adapters that a config asks for."""
    lora = config.model.lora
    if lora is None:
        return 0
    refuse_base(config.model.base, shape)
    targets = None if lora.targets == "all-linear" else lora.targets
    found = shape.lora_parameters(lora.r, targets)
    if not found:
        what = f"{config.model.path} has no linear layer {' or '.join(lora.targets) or '(the list is empty)'}"
        raise ConfigError([Problem("model.lora.targets", what, "Write all-linear, or names such as [q_proj, v_proj].")])
    return found


def _config_json(path: str) -> dict[str, Any] | None:
    folder = Path(path).expanduser()
    if folder.is_dir():
        file = folder / "config.json"
        if not file.exists():
            raise ModelError(f"{path} has no config.json, so it is not the folder of a model.")
        try:
            found = json.loads(file.read_text())
        except (ValueError, RecursionError, OSError) as error:
            raise ModelError(f"{file} is not JSON: {error}") from None
        if not isinstance(found, dict):
            raise ModelError(f"{file} is not a model's config: it holds a {type(found).__name__}.")
        return found
    if folder.suffix == ".gguf" or folder.exists():
        return None
    if _well_known(path) is not None:
        return None
    if is_local(path):
        raise ModelError(f"There is no folder {folder.absolute()}.{near_models(folder)}")
    from huggingface_hub import hf_hub_download

    try:
        return dict(json.loads(Path(hf_hub_download(path, "config.json")).read_text()))
    except Exception as error:  # the hub's errors are many, and each says what is wrong
        first = first_line(error)
        raise ModelError(
            f"No config.json for {path}: {first} Name a folder that holds one, or one of {', '.join(sorted(WELL_KNOWN))}."
        ) from None


def _well_known(path: str) -> dict[str, Any] | None:
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        return None  # a folder, which may hold anything
    name = path.split("/")[-1].lower()
    for suffix in ("-instruct", "-base", "-chat", "-it"):
        name = name.removesuffix(suffix)
    return WELL_KNOWN.get(name)
