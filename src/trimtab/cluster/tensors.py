"""A channel on which tensors travel as plain arrays: many small ones, as samples have, are pickled ten times as fast."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch

from trimtab.workers.messages import Channel
from trimtab.workers.program import ProgramProcess


def tensor_of(array: np.ndarray[Any, Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(array).view(dtype).view(shape) if array.size else torch.empty(shape, dtype=dtype)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.device.type != "cpu" or value.requires_grad:
            return NotImplemented
        flat = value.reshape(-1)
        if flat.stride(0) != 1:  # one element that was expanded
            flat = torch.empty(flat.shape, dtype=flat.dtype).copy_(flat)
        return tensor_of, (flat.view(torch.uint8).numpy(), value.dtype, tuple(value.shape))


class TensorChannel(Channel):
    """See workers/messages.py."""

    def dumps(self, message: Any) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(message)
        return buffer.getvalue()


class RankProcess(ProgramProcess):
    """The process of a rank."""

    channel_type = TensorChannel
