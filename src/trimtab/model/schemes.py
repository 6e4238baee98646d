"""How a checkpoint stores its weights, by its config alone, and what reading them takes. Needs no torch: the plan reads it.

Guarantee: a way of storing weights that is not served is refused here, by name, for `plan`, `--dry-run` and `train` alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab.base.errors import ModelError

SERVED = (
    "MXFP4 (gpt-oss), FP8 with weight_scale_inv (DeepSeek-V3, Ministral 3) and compressed-tensors float-quantized are read "
    "and dequantised on loading"
)
QUANTISED = ("quantization_config", "compression_config")
"""What configs call it."""
FLOATS = ("float-quantized", "naive-quantized")


@dataclass(frozen=True)
class Scheme:
    """How weights are quantised in a checkpoint."""

    method: str
    """mxfp4, fp8 or compressed-tensors."""
    block: tuple[int, int] | None = None
    """Rows and columns that one scale is for; None: a row, or the matrix."""

    @property
    def words(self) -> str:
        if self.method == "mxfp4":
            return "MXFP4"
        grid = "" if self.block is None else f" in blocks of {self.block[0]} x {self.block[1]}"
        return f"FP8{grid}" + (" (compressed-tensors)" if self.method == "compressed-tensors" else "")


def read_scheme(path: str, config: Mapping[str, Any]) -> Scheme | None:
    """How the checkpoint with this config.json stores its weights; None: as they are. Refuses what is not served."""
    found = next(filter(None, map(config.get, QUANTISED)), None)
    if not found:
        return None
    if not isinstance(found, Mapping):
        raise ModelError(f"model.path: the config of {path!r} has a quantization_config that is no mapping.")
    method = str(found.get("quant_method") or "of an unnamed kind")
    if method == "mxfp4":
        return Scheme("mxfp4")
    if method == "fp8":
        return Scheme("fp8", _block(path, found.get("weight_block_size")))
    if method == "compressed-tensors":
        return _compressed(path, found)
    raise _refused(path, method)


def _refused(path: str, what: str) -> ModelError:
    return ModelError(
        f"model.path: {path!r} holds quantised weights ({what}), which cannot be trained. Use the model's unquantised "
        f"checkpoint, or its GGUF file, which is dequantised on loading; {SERVED}, too."
    )


def _block(path: str, found: Any) -> tuple[int, int] | None:
    if found is None:
        return None
    if not (isinstance(found, list | tuple) and len(found) == 2 and all(isinstance(n, int) and n > 0 for n in found)):
        raise ModelError(
            f"model.path: the config of {path!r} has a weight_block_size that is no pair of numbers: {found!r}."
        )
    return found[0], found[1]


def _compressed(path: str, found: Mapping[str, Any]) -> Scheme:
    """compressed-tensors: weights in eight-bit floats, all stored in one way."""
    groups = found.get("config_groups")
    kind, ways = found.get("format"), []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            ways.append(weights)
            kind = group.get("format") or kind
    named = f"compressed-tensors, {kind}"
    if kind not in FLOATS or not ways:
        raise _refused(path, named)
    if any((way.get("type"), way.get("num_bits")) != ("float", 8) for way in ways):
        raise _refused(path, f"{named}, other than 8-bit floats")
    strategies = {str(way.get("strategy")) for way in ways}
    if not strategies <= {"tensor", "channel", "block"} or ("block" in strategies and len(strategies) > 1):
        raise _refused(path, f"{named}, with scales by {', '.join(sorted(strategies))}")
    blocks = {_block(path, way.get("block_structure")) for way in ways} if "block" in strategies else {None}
    if len(blocks) > 1:
        raise _refused(path, f"{named}, with blocks of several sizes")
    return Scheme("compressed-tensors", blocks.pop())
