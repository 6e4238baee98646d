"""What a trainer and an engine's process say to each other. Both run this source; the engine's environment may be another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Weight:
    """Where a tensor lies in memory that both processes see."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """In bytes, from the beginning of the file or of the allocation."""
    handle: int = 0
    """Which allocation it lies in, where it is on a device."""


@dataclass(frozen=True)
class Weights:
    """Where all of them lie: in a file in host memory, or in allocations of the device that both use (ipc.py)."""

    layout: tuple[Weight, ...]
    file: str | None = None
    handles: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class EngineSetup:
    """What an engine is made with. The first message to a process."""

    folder: str
    """Holds the model's config and the tokenizer, no weights."""
    dtype: str
    cuda: bool
    max_sequences: int
    kv_bytes: int
    """KV cache on each device."""
    prefill_tokens: int
    page_tokens: int
    longest: int
    """Tokens of the longest sequence."""
    prefix_cache: bool
    eager: bool
    sleeps: bool
    """Memory is given up between rollouts."""
    rank: int = 0
    """Rank of the adapters, which are published by themselves; 0: there are none."""
    tensor_parallel: int = 1
    """Devices that a copy of the model is cut over."""

    @property
    def plain(self) -> bool:
        """Half-precision kernels cannot be used: float32 weights, or no GPU."""
        return self.dtype == "float32" or not self.cuda

    @property
    def exact(self) -> dict[str, str]:
        """Variables that keep Triton's float32 products in float32; in TF32 a log-prob is off by 3e-3."""
        return {"TRITON_F32_DEFAULT": "ieee"} if self.dtype == "float32" else {}


@dataclass(frozen=True)
class Ask:
    """One sequence."""

    id: int
    tokens: list[int]
    limit: int
    key: int
    """Which random numbers it is drawn from (`sampler.stream_key`)."""


@dataclass(frozen=True)
class Generate:
    """Begin with these; answered by a `Done` each."""

    call: int
    asks: list[Ask]
    sampling: dict[str, Any]
    stop_ids: list[int]


@dataclass(frozen=True)
class Abort:
    """Forget everything unfinished; answered by `Settled`."""


@dataclass(frozen=True)
class Publish:
    """Read what was published, and forget what was computed before; answered by `Settled`, or by `Unread`."""

    version: int
    weights: Weights | None = None
    """None: those of the `Publish` before."""
    adapters: str | None = None
    """Folder of new adapters."""


@dataclass(frozen=True)
class Sleep:
    """Give memory up until the next `Publish` or `Generate`; answered by `Settled`."""


@dataclass(frozen=True)
class Ready:
    """The engine can be asked."""

    version: str
    blocks: int
    """Blocks of the KV cache."""


@dataclass(frozen=True)
class Settled:
    """An order has been carried out."""


@dataclass(frozen=True)
class Unread:
    """The weights of a `Publish` are not where this process can see them; nothing was changed."""

    why: str


@dataclass(frozen=True)
class Done:
    """A sequence has ended."""

    call: int
    id: int
    tokens: bytes
    """int64."""
    logprobs: bytes
    """float32."""
    stopped: bool


@dataclass(frozen=True)
class Beat:
    """The process is alive; what the current call has done so far."""

    call: int
    decode_steps: int
    prefill_tokens: int
    cached_tokens: int
    blocks: int
    """Blocks of the KV cache in use, at most."""


@dataclass(frozen=True)
class Failed:
    """The last message of a process that cannot go on."""

    text: str
    out_of_memory: bool
