"""A Hugging Face folder in pieces, for whoever writes its weights himself: which tensors it stores, under which names, and the
other files as bytes. Together they are what `save_model` or `save_adapters` would write."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from trimtab.model.adapters import has_adapters, save_adapters
from trimtab.model.transfer import apart

WEIGHTS_FILE, ADAPTERS_FILE = "model.safetensors", "adapter_model.safetensors"
WEIGHTS_METADATA = {"format": "pt"}
"""What a file of weights says of itself: transformers looks for it."""


def weights_file(model: Any) -> str:
    """The file that a model's trained weights are stored in."""
    return ADAPTERS_FILE if has_adapters(model) else WEIGHTS_FILE


def stored_weights(model: Any) -> dict[str, torch.Tensor]:
    """The model's own tensors that its folder stores: adapters alone, where it has them. Tied ones are one object."""
    if has_adapters(model):
        adapters: dict[str, torch.Tensor] = get_peft_model_state_dict(model, save_embedding_layers=False)
        return adapters
    named = model.state_dict(keep_vars=True)
    ignored = set(model._keys_to_ignore_on_save or ())
    return {name: value for name, value in named.items() if name not in ignored}


@torch.no_grad()
def as_stored(model: Any, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of `stored_weights`, or copies of some of them on the host, as a folder stores them: tied ones once, and those that
    were joined on loading (experts) apart again. Whole units of the weight store can be given by themselves."""
    if has_adapters(model):
        return dict(state)
    found = {id(value): apart(value.detach()) for value in state.values()}
    named = {name: found[id(value)] for name, value in state.items()}
    kept: dict[str, torch.Tensor] = revert_weight_conversion(model, remove_tied_weights_from_state_dict(named, model))
    return kept


def other_files(model: Any, tokenizer: Any) -> dict[str, bytes]:
    """The folder's files beside the weights. They do not change while a model is trained, so once is enough."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if has_adapters(model):
            save_adapters(model, folder)
        else:
            model.save_pretrained(folder, state_dict={})
            tokenizer.save_pretrained(folder)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.suffix != ".safetensors"]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
