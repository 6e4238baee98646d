"""Models in and out: a hub name, a folder or a GGUF file in; a Hugging Face folder out.

Mistakes that the name alone shows are reported before any weight is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import cached_file, logging

from trimtab.base.errors import ConfigError, ModelError, Problem
from trimtab.base.suggestions import is_local
from trimtab.config.schema import Model
from trimtab.model.adapters import has_adapters, merged_state
from trimtab.model.codes import quantise_layers
from trimtab.model.context import HYBRIDS, nearest_served, served_layers
from trimtab.model.names import inside_run, near_models
from trimtab.model.schemes import QUANTISED, Scheme, read_scheme
from trimtab.model.stored import Stored
from trimtab.model.stored_codes import folder_of, holds_plain_layers, kind_stored, load_stored
from trimtab.model.text_part import experts_turned, sees, text_config, text_names
from trimtab.model.transfer import host_state
from trimtab.model.versions import STATES_ARE_HANDED
from trimtab.model.with_vision import WHOLE, save_with_vision, whole_of

logging.disable_progress_bar()  # Trimtab has its own view of a run

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
WEIGHTS = ("*.safetensors", "*.bin")
DOWNLOAD_AGAIN = "Download it again."


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from, as transformers wants it said."""

    location: str
    gguf_file: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}

    @property
    def also(self) -> str:
        """What to add where the model could not be read: a hub name may have been meant as a folder."""
        local = Path(self.location).absolute()
        near = near_models(local) if local.parent.is_dir() else ""
        return "" if local.exists() else f"There is no folder {local} either.{near}"


def find_source(path: str, key: str = "model.path") -> ModelSource:
    """Tell a GGUF file, a folder and a hub name apart, and say what is missing where none fits. `key` is what holds the path."""
    local = Path(path).expanduser()
    if path.endswith(".gguf"):
        if not local.is_file():
            raise ModelError(f"{key}: no GGUF file at {local.absolute()}.{near_models(local)}")
        _require_gguf()
        return ModelSource(str(local.parent), local.name)
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ModelError(
                f"{key}: {local.absolute()} has no config.json, so it is not a Hugging Face model folder.{inside_run(local)}"
            )
        return ModelSource(str(local))
    if is_local(path):
        raise ModelError(
            f"{key}: no model folder at {local.absolute()}.{near_models(local)} Give a folder, a .gguf file or a hub name."
        )
    return ModelSource(path)


def resolve_dtype(model: Model, device: torch.device) -> torch.dtype:
    if model.dtype != "auto":
        return DTYPES[model.dtype]
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if has_bfloat16(device) else torch.float16


def has_bfloat16(device: torch.device) -> bool:
    """A GPU has units that compute in bfloat16. One that is not here is taken to: a run may be exported elsewhere."""
    if not torch.cuda.is_available():
        return True
    return torch.cuda.get_device_capability(device)[0] >= 8


def refuse_dtype(model: Model, device: torch.device) -> None:
    """A type that a GPU would only imitate."""
    if model.dtype == "bfloat16" and device.type == "cuda" and not has_bfloat16(device):
        name, (major, minor) = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
        what = f"a {name} (sm_{major}{minor}) does not compute in bfloat16"
        raise ConfigError(
            [Problem("model.dtype", what, "Write float16, which is trained with loss scaling, or float32.")]
        )


def load_model(model: Model, device: torch.device) -> Any:
    """The model on its device, in its working type; its layers in codes where `model.base` says so, and else nothing."""
    source = find_source(model.path)
    dtype = resolve_dtype(model, device)
    if (settings := _read_codes(model, source)) is not None:
        return _load_codes(model, source, settings, dtype, device)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": model.trust_remote_code, **source.options}
    if dtype == torch.float64:
        options["experts_implementation"] = "eager"  # the grouped matrix product has no float64 kernel
    config, scheme, wrapped = _read_config(model)
    with _as_model_error(f"model.path: cannot load {model.path!r}", source.also):
        if scheme is None and not wrapped:
            found = AutoModelForCausalLM.from_pretrained(source.location, output_loading_info=True, **options)
        else:
            found = _load_stored(source.location, config, scheme, wrapped, options)
    loaded, report = found
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(
            f"model.path: {model.path!r} lacks {len(missing)} weight(s) of a {type(loaded).__name__}, such as "
            f"{missing[0]}, which would be random. Name a complete checkpoint of a causal language model."
        )
    _make_savable(loaded)
    if source.gguf_file:
        _forget_quantisation(loaded)
    if wrapped and scheme is None:
        setattr(loaded, WHOLE, source.location)
    return _put_in_place(model, loaded.to(dtype=dtype), device)


def _read_codes(model: Model, source: ModelSource) -> Any:
    """The settings of a checkpoint's codes, where these are read as they are or, of four bits, as what they stand for."""
    if source.gguf_file:
        return None
    with _as_model_error(f"model.path: cannot read the config of {model.path!r}", source.also):
        config = AutoConfig.from_pretrained(source.location, trust_remote_code=model.trust_remote_code)
    return getattr(config, "quantization_config", None) if reads_codes(model, config) else None


def reads_codes(model: Model, config: Any) -> bool:
    """A checkpoint's codes stay as they are under adapters; nobody else reads four bits."""
    kind = kind_stored(getattr(config, "quantization_config", None))
    if kind is None or model.trust_remote_code or not holds_plain_layers(config):
        return False
    stays = model.lora is not None and model.base in ("auto", kind)
    return stays or (kind == "4bit" and (model.lora is not None or model.base == "bf16"))


def _load_codes(model: Model, source: ModelSource, settings: Any, dtype: torch.dtype, device: torch.device) -> Any:
    """A model whose checkpoint stores codes: in these codes, or in none or others where `model.base` says so."""
    plain = model.base not in ("auto", kind_stored(settings))
    with _as_model_error(f"model.path: cannot load {model.path!r}", source.also):
        folder = folder_of(source.location)
        loaded = load_stored(folder, load_config(model), settings, dtype, plain)
    _make_savable(loaded)
    return _put_in_place(model, loaded, device) if plain else loaded.to(device=device)


def _put_in_place(model: Model, loaded: Any, device: torch.device) -> Any:
    """The model on its device, its layers put into codes on the way where `model.base` says so."""
    if model.base in ("fp8", "4bit"):
        quantise_layers(loaded, model.base, device)
    return loaded.to(device=device)


def _load_stored(
    location: str, config: Any, scheme: Scheme | None, wrapped: bool, options: Mapping[str, Any]
) -> tuple[Any, Any]:
    """A model from tensors that are read here: dequantised, and of the text part alone where there is another."""
    stored = Stored(location, scheme, options["dtype"])
    known = {name: value for name, value in options.items() if name != "trust_remote_code"}
    tensors = stored.opened()
    names = text_names(tensors) if wrapped else {name: name for name in tensors}
    state = experts_turned({new: tensors[old] for old, new in names.items()}, config)
    made = AutoModelForCausalLM._model_mapping[type(config)]
    loaded, report = made.from_pretrained(None, config=config, state_dict=state, output_loading_info=True, **known)
    with suppress(Exception):  # few models have none
        loaded.generation_config = GenerationConfig.from_pretrained(location)
    return loaded, report


def load_tokenizer(model: Model) -> Any:
    """The tokenizer of the model, or the one that `model.tokenizer` names."""
    what = "model.tokenizer" if model.tokenizer else "model.path"
    source = find_source(model.tokenizer or model.path, what)
    with _as_model_error(
        f"{what}: cannot load a tokenizer from {source.location!r}",
        "Set model.tokenizer to a folder or hub repository with tokenizer files.",
    ):
        tokenizer = AutoTokenizer.from_pretrained(
            source.location, trust_remote_code=model.trust_remote_code, **source.options
        )
    if not source.gguf_file:  # or both are of one file, which takes seconds to read
        _refuse_tokens_without_embedding(tokenizer, model, what)
    return tokenizer


def refuse_without_weights(model: Model) -> None:
    """A folder may hold a config alone: enough for a plan, not for a run."""
    source = find_source(model.path)
    folder = Path(source.location)
    if folder.is_dir() and not source.gguf_file and not any(found for end in WEIGHTS for found in folder.glob(end)):
        raise ModelError(f"model.path: {folder.absolute()} has no weights: no file {' or '.join(WEIGHTS)}.")
    for index in folder.glob("*.index.json"):
        named = _named_files(index)
        missing = [name for name in named if not (folder / name).is_file()]
        if missing:
            raise ModelError(
                f"model.path: {folder.absolute()} lacks {len(missing)} of its {len(named)} weight files, such as "
                f"{missing[0]}. {DOWNLOAD_AGAIN}"
            )


def _named_files(index: Path) -> list[str]:
    """The files of weights that an index names."""
    try:
        held = json.loads(index.read_text(encoding="utf-8")) if index.is_file() else None
    except (ValueError, RecursionError, OSError) as error:
        raise ModelError(
            f"model.path: {index.absolute()} is damaged: it is not JSON ({error}). {DOWNLOAD_AGAIN}"
        ) from error
    named = held.get("weight_map", {}) if isinstance(held, dict) else None
    if not isinstance(named, dict) or not all(isinstance(file, str) and len(file) < 256 for file in named.values()):
        raise ModelError(f"model.path: {index.absolute()} is damaged: its weight_map names no files. {DOWNLOAD_AGAIN}")
    return sorted(set(named.values()))


def written_words(model: Model) -> dict[str, int] | None:
    """Which token is which number, by the tokenizer's own file; None where there is no such file."""
    file = cached_file(
        find_source(model.tokenizer or model.path).location,
        "tokenizer.json",
        _raise_exceptions_for_missing_entries=False,
    )
    return None if file is None else Tokenizer.from_file(file).get_vocab(with_added_tokens=False)


def _refuse_tokens_without_embedding(tokenizer: Any, model: Model, key: str) -> None:
    """Tokens without an embedding. Those added to a vocabulary may have none: padding, which is never read."""
    vocab_size = load_config(model).get_text_config().vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ModelError(
            f"{key}: the tokenizer has {tokenizer.vocab_size} tokens, but {model.path!r} has {vocab_size}. Set model.tokenizer "
            "to the tokenizer that the model was trained with."
        )
    written = f"{tokenizer.chat_template or ''}{tokenizer.bos_token or ''}"
    lacking = [word for word, number in tokenizer.get_added_vocab().items() if number >= vocab_size and word in written]
    if lacking:
        raise ModelError(
            f"{key}: prompts would contain {', '.join(map(repr, lacking))}, but {model.path!r} has embeddings for only "
            f"{vocab_size} tokens. Resize its embedding (resize_token_embeddings) and save it, or name its own tokenizer."
        )


def load_config(model: Model) -> Any:
    """The architecture of the language model, without weights: that of the text part, where there is another."""
    return _read_config(model)[0]


def scheme_of(model: Model) -> Scheme | None:
    """How the checkpoint's weights are quantised; None: they are not, or are in a GGUF file."""
    return _read_config(model)[1]


def _read_config(model: Model) -> tuple[Any, Scheme | None, bool]:
    """The language model's config, how its weights are stored, and whether they are those of a part."""
    source, scheme = find_source(model.path), None
    with _as_model_error(f"model.path: cannot read the config of {model.path!r}", source.also):
        if source.gguf_file:
            file = Path(source.location, source.gguf_file).stat()
            config = deepcopy(_read_gguf(source, file.st_mtime_ns, file.st_size))
        else:
            config = AutoConfig.from_pretrained(source.location, trust_remote_code=model.trust_remote_code)
    if not source.gguf_file:
        if reads_codes(model, config):
            del config.quantization_config
        else:
            refuse_codes(model, getattr(config, "quantization_config", None))
            scheme = read_scheme(model.path, vars(config)) or read_scheme(
                model.path, vars(getattr(config, "text_config", config))
            )
    remote = model.trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if remote and scheme is not None:
        raise ModelError(
            f"model.path: {model.path!r} has code of its own and quantised weights ({scheme.words}), which Trimtab cannot put "
            "together. Use the model's unquantised checkpoint."
        )
    wrapped = not remote and sees(config)
    if wrapped:
        config = text_config(model.path, config)
    if scheme is not None:
        _forget_quantisation(config)
    if type(config) not in AutoModelForCausalLM._model_mapping and not remote:
        raise ModelError(f"model.path: {model.path!r} is a {config.model_type} model, not a causal language model.")
    if not remote:
        made = AutoModelForCausalLM._model_mapping[type(config)]
        refuse_unsupported(made, made.__name__, config.get_text_config())
    return config, scheme, wrapped


@lru_cache(maxsize=4)
def _read_gguf(source: ModelSource, changed: int, size: int) -> Any:
    """The config in a GGUF file: read once until the file changes, as it takes seconds (the vocabulary lies beside it)."""
    return AutoConfig.from_pretrained(source.location, gguf_file=source.gguf_file)


def refuse_codes(model: Model, found: Any) -> None:
    """Refuse a checkpoint in four bits that is to be trained whole as it is."""
    if kind_stored(found) == "4bit":
        raise ModelError(
            f"model.path: {model.path!r} holds quantised weights (bitsandbytes), which cannot be trained. Set model.lora to "
            "train adapters over them as they are, or model.base: bf16 to train what they stand for."
        )


def refuse_unsupported(made: Any, name: str, config: Any) -> None:
    """Refuse a model, or the class of one, that cannot be packed; `config` is that of its text."""
    kind = getattr(config, "model_type", None)
    if getattr(made, "_is_stateful", False) and kind not in HYBRIDS:
        raise ModelError(
            f"{name} has layers that carry a state from token to token, of a kind that was not compared ({kind}). "
            f"Families with such layers that Trimtab serves: {', '.join(sorted(HYBRIDS))}."
        )
    if not getattr(made, "_supports_attention_backend", False) and kind not in HYBRIDS:
        raise ModelError(
            f"{name} does not use transformers' attention interface, so Trimtab cannot pack sequences "
            f"for it without changing its result. {nearest_served(kind)}"
        )
    kinds = set(getattr(config, "layer_types", None) or []) - served_layers(kind)
    if kinds:
        served = " and ".join(sorted(served_layers(kind)))
        raise ModelError(
            f"{name} has layers of kind {', '.join(sorted(kinds))}; Trimtab supports {served} layers only. "
            + nearest_served(kind)
        )
    if kind in HYBRIDS and not STATES_ARE_HANDED:
        raise ModelError(
            f"{name} has layers that carry a state, which this version of transformers does not hand over. "
            "Install transformers 5.22 or newer."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{name} is an encoder-decoder model; Trimtab trains decoder-only models. {nearest_served(kind)}"
        )


def stop_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a completion, from the generation config, the model's config and the tokenizer."""
    ids: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        eos = getattr(owner, "eos_token_id", None)
        ids.update([eos] if isinstance(eos, int) else eos or [])
    return sorted(ids)


def declared_stops(model: Model, tokenizer: Any) -> list[int]:
    """The same before the weights are loaded."""
    source, generation = find_source(model.path), None
    if not source.gguf_file:
        with suppress(Exception):  # few models have none, and a damaged one is told when the model is loaded
            generation = GenerationConfig.from_pretrained(source.location)
    return stop_token_ids(SimpleNamespace(config=load_config(model), generation_config=generation), tokenizer)


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a Hugging Face folder that loads anywhere, without a trace of how it was trained: adapters are merged in, and a text
    part is put back in the model that it came from."""
    folder.mkdir(parents=True, exist_ok=True)
    if has_adapters(model):
        state, model = merged_state(model), model.get_base_model()
    else:
        state = None
    whole = whole_of(model)
    if whole is None:
        model.save_pretrained(folder, state_dict=host_state(model) if state is None else state)
    else:
        save_with_vision(model, model.state_dict() if state is None else state, whole, folder)
    tokenizer.save_pretrained(folder)


def is_part(model: Model) -> bool:
    """What is trained is the text part of a model that also sees, and is saved as such."""
    if not Path(model.path).expanduser().exists():
        if is_local(model.path):
            return False  # it has been moved since
        if not isinstance(try_to_load_from_cache(model.path, "config.json"), str):
            return False  # and a run would have left it there
    _, scheme, wrapped = _read_config(model)
    return wrapped and scheme is None


def remember_whole(loaded: Any, model: Model) -> Any:
    """Have a text part that is loaded from elsewhere, such as a checkpoint, saved as the model is that it came from."""
    if is_part(model):
        setattr(loaded, WHOLE, find_source(model.path).location)
    return loaded


def _forget_quantisation(loaded: Any) -> None:
    """What was dequantised on loading is like any other model; what transformers notes of its past would keep it from being
    saved."""
    for owner in (loaded, getattr(loaded, "config", loaded)):
        for name in ("hf_quantizer", "is_quantized", "quantization_method", "_is_quantized", *QUANTISED):
            vars(owner).pop(name, None)


def _require_gguf() -> None:
    try:
        import gguf  # noqa: F401
    except ImportError as error:
        raise ModelError(
            "model.path is a GGUF file. Install the gguf package to read it: pip install 'trimtab[gguf]'."
        ) from error


def _make_savable(model: Any) -> None:
    """transformers loads a generation config that it refuses to save (a temperature without do_sample, in many older
    models); found at the first checkpoint, that would cost the run."""
    generation = model.generation_config
    if generation is not None:
        try:
            generation.validate(strict=True)
        except ValueError:
            generation.do_sample = True


def building(model: Model, config: Any) -> AbstractContextManager[None]:
    """One ModelError for whatever an architecture's own code raises where it is built from a config."""
    return _as_model_error(f"model.path: a {config.model_type} model cannot be built from the config of {model.path!r}")


@contextmanager
def _as_model_error(what: str, fix: str = "") -> Iterator[None]:
    """One ModelError for the score of types that transformers, huggingface_hub, httpx and safetensors raise."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or ["no message"]
        raise ModelError(f"{what}: {type(error).__name__}: {lines[0].rstrip('.')}. {fix}".rstrip()) from error
