"""A trained text part back in the model that also sees, as it was published.

Guarantee: what is written loads as the original's class; its vision part is the original's, bit for bit, and on text alone it
computes what the trained model does.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForImageTextToText
from transformers.utils import cached_file

from trimtab.base.errors import ModelError

WHOLE = "trimtab_whole_model"
"""The attribute of a loaded text part that says where the whole is."""
BESIDE = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "image_processor_config.json",
    "generation_config.json",
)  # fmt: skip
"""Files that describe how images are read."""


def whole_of(model: Any) -> str | None:
    """Where the model is that this is the text part of; None where it is a model by itself."""
    found: str | None = getattr(model, WHOLE, None)
    return found


@torch.no_grad()
def save_with_vision(model: Any, state: Mapping[str, torch.Tensor], location: str, folder: Path) -> None:
    """Write the whole model, with the text part's weights from `state` (by the names of `model`)."""
    dtype = next(iter(state.values())).dtype
    try:
        whole: Any = AutoModelForImageTextToText.from_pretrained(location, dtype="auto")
    except Exception as error:
        raise ModelError(
            f"The vision part cannot be read again from {location}: {error}. The last checkpoint of the run holds the trained "
            "text part as a model of its own."
        ) from error
    whole = whole.to(torch.promote_types(whole.dtype, dtype))  # nothing is rounded
    body, head = _prefix(model, model.get_decoder()), model.get_output_embeddings()
    places = whole.get_decoder().state_dict()
    found = {name.removeprefix(body): value for name, value in state.items() if name.startswith(body)}
    apart = sorted(name for name in {*places, *found} if name not in found or places[name].shape != found[name].shape)
    if apart:
        raise ModelError(
            f"The text part does not fit into {location} any more: {apart[0]} is missing there, or of another size."
        )
    for name, value in found.items():
        places[name].copy_(value)
    if not whole.config.tie_word_embeddings:
        whole.get_output_embeddings().weight.copy_(state[f"{_prefix(model, head)}weight"])
    whole.save_pretrained(folder)
    for name in BESIDE:
        file = cached_file(location, name, _raise_exceptions_for_missing_entries=False)
        if file is not None:
            shutil.copyfile(file, folder / name)


def _prefix(model: Any, part: Any) -> str:
    return next(f"{name}." for name, module in model.named_modules() if module is part)
