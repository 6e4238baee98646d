"""A safetensors file, written a tensor at a time: what safetensors' own `save_file` writes, byte for byte.

Its size and sha256 are found on the way, so that no file is read again, and a tensor of a device passes through a bounded buffer,
so that the host needs no room for all of them. Copying, hashing and writing release Python's lock: a thread that writes does not
stop the one that trains. Tensors are read while the file is written; nobody may change them until it is.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from trimtab.base.units import MIB
from trimtab.record.checksums import Sum

CHUNK_BYTES = 16 * MIB
"""What is copied from a device, hashed and written at a time."""
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
"""As a header names them, in the order of safetensors: it stores tensors by type, last one first, and then by name."""


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Sum:
    """Write a file that is not there yet, on disk when this returns. Returns its size and sha256."""
    ranks = {dtype: rank for rank, dtype in enumerate(DTYPES)}
    names = sorted(tensors, key=lambda name: (-ranks[tensors[name].dtype], name))
    digest, size = hashlib.sha256(), 0
    with file.open("wb") as out:
        for data in _all_of_it(names, tensors, metadata):
            digest.update(data)
            size += out.write(data)
        out.flush()
        os.fsync(out.fileno())
    return {"bytes": size, "sha256": digest.hexdigest()}


def _all_of_it(
    names: list[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None
) -> Iterator[memoryview]:
    yield memoryview(_header(names, tensors, metadata))
    for name in names:
        yield from _chunks(tensors[name].detach())


def _header(names: list[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> bytes:
    """Eight bytes of length, then JSON, filled up with spaces so that the data begins at a multiple of eight."""
    table: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        table[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes by rows, a chunk at a time."""
    if not tensor.numel():
        return
    if not tensor.is_contiguous():
        tensor = tensor.cpu().contiguous()
    flat = tensor.view(-1).view(torch.uint8)
    room = torch.empty(0 if flat.device.type == "cpu" else min(CHUNK_BYTES, flat.numel()), dtype=torch.uint8)
    for begin in range(0, flat.numel(), CHUNK_BYTES):
        part = flat[begin : begin + CHUNK_BYTES]
        host = part if part.device.type == "cpu" else room[: part.numel()].copy_(part)
        yield memoryview(host.numpy())  # type: ignore[arg-type]  # arrays are buffers before Python 3.12 too
