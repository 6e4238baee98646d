"""A channel on which all tensors of a message travel together, as one array a type.

A step sends thousands of small tensors (samples, trajectories). Pickled one by one they would cost a tenth of a small model's
step; laid end to end they cost a few milliseconds.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from trimtab.workers.messages import Channel
from trimtab.workers.program import ProgramProcess


def slot(number: int) -> torch.Tensor:
    """Stands for a tensor in a pickle; `_TensorUnpickler` puts the tensor there."""
    raise AssertionError(f"tensor {number} is read by its channel only")


class _TensorPickler(pickle.Pickler):
    """Pickles a message without its tensors, which it keeps."""

    def __init__(self, buffer: io.BytesIO) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        self.tensors.append(value)
        return slot, (len(self.tensors) - 1,)


class _TensorUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensors = tensors

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == slot.__name__:
            return self._tensors.__getitem__
        return super().find_class(module, name)


def dumps(message: Any) -> bytes:
    """A message as bytes."""
    buffer = io.BytesIO()
    pickler = _TensorPickler(buffer)
    pickler.dump(message)
    by_type: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in pickler.tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor.reshape(-1))
    arrays = [(dtype, torch.cat(found).view(torch.uint8).numpy()) for dtype, found in by_type.items()]
    shapes = [(tensor.dtype, tuple(tensor.shape)) for tensor in pickler.tensors]
    return pickle.dumps((buffer.getvalue(), arrays, shapes), protocol=pickle.HIGHEST_PROTOCOL)


def loads(data: bytes) -> Any:
    """The message that `dumps` made bytes of."""
    body, arrays, shapes = pickle.loads(data)
    return _TensorUnpickler(body, _tensors(arrays, shapes)).load()


class TensorChannel(Channel):
    """See workers/messages.py."""

    def dumps(self, message: Any) -> bytes:
        return dumps(message)

    def loads(self, data: bytes) -> Any:
        return loads(data)


def _tensors(
    arrays: Sequence[tuple[torch.dtype, np.ndarray[Any, Any]]], shapes: Sequence[tuple[torch.dtype, tuple[int, ...]]]
) -> list[torch.Tensor]:
    """The tensors of these types and shapes, cut from one array a type."""
    parts: dict[torch.dtype, Iterator[torch.Tensor]] = {}
    for dtype, array in arrays:
        sizes = [torch.Size(shape).numel() for kind, shape in shapes if kind is dtype]
        flat = torch.from_numpy(array).view(dtype) if array.size else torch.empty(0, dtype=dtype)
        parts[dtype] = iter(flat.split(sizes))
    found = (next(parts[dtype]) if len(shape) == 1 else next(parts[dtype]).view(shape) for dtype, shape in shapes)
    return list(found)


class RankProcess(ProgramProcess):
    """The process of a rank."""

    channel_type = TensorChannel
