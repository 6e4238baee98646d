"""Adam's moments in one byte an element, in blocks of 256 that have one float32 scale each: Dettmers et al. 2021, arXiv
2110.02861.

A block is divided by its largest absolute value, and each quotient becomes the nearest of 256 values (a "dynamic" map: seven
decades, each with twice as many steps as the one below it). One large element costs its own block precision and no other. An
element costs 1 + 4 / 256 bytes, in the place of 4.

What this module guarantees:
- A first moment is off by at most 0.7 % of its block's largest; one within a tenth of that, by at most 7.1 % of itself. A second
  moment by half as much. Each decade below has half as many steps.
- The largest of a block, of either sign, and zero are exact, so what is stored and read again without a change stays as it is,
  bit for bit. (The map of the paper's own code has no -1: a block led by a negative value would shrink by 0.7 % each time.)
- A second moment that is not zero does not become zero: it divides, and what it divides may be large. It becomes too large
  instead, which makes a step smaller.
- Nothing is allocated but in `Room(...)`. Blocks know nothing of each other, so how the state is cut into pieces changes nothing.

N elements, a multiple of BLOCK.
"""

from __future__ import annotations

import torch

from trimtab.model.sizes import BLOCK

DECADES = 7


def _steps(count: int) -> torch.Tensor:
    """The middles of so many equal parts of 0.1 to 1."""
    edges = torch.linspace(0.1, 1.0, count + 1, dtype=torch.float64)
    return (edges[:-1] + edges[1:]) / 2


def signed_map() -> torch.Tensor:
    """[255] ascending: -1 to 1, as many on either side of 0."""
    above = torch.cat([10.0 ** (i + 1 - DECADES) * _steps(2**i) for i in range(DECADES)])
    above[-1] = 1.0
    return torch.cat([-above.flip(0), torch.zeros(1, dtype=torch.float64), above]).float()


def unsigned_map() -> torch.Tensor:
    """[256] ascending: 0 to 1, so twice as fine."""
    above = torch.cat([10.0 ** (i + 1 - DECADES) * _steps(2 ** (i + 1)) for i in range(DECADES)])
    return torch.cat([torch.zeros(1, dtype=torch.float64), above, torch.ones(1, dtype=torch.float64)]).float()


class Room:
    """The moments of up to `size` elements at a time in full, between their codes and back. Makes all its tensors at once."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self._moments = torch.empty(2, size, dtype=dtype, device=device)
        self._shares = torch.empty(size, dtype=dtype, device=device)
        self._index = torch.empty(size, dtype=torch.int32, device=device)
        self._peaks = torch.empty(size // BLOCK, dtype=dtype, device=device)
        self._tiny = torch.finfo(dtype).tiny
        maps = (signed_map(), unsigned_map())
        self._maps = [values.to(device, dtype) for values in maps]
        self._edges = [((values[1:].double() + values[:-1].double()) / 2).to(device, dtype) for values in maps]
        self._edges[1][0] = 0.0  # what is above zero stays above zero

    @property
    def size(self) -> int:
        return self._shares.numel()

    def load(self, codes_2N: torch.Tensor, scales_2B: torch.Tensor) -> torch.Tensor:
        """[2, N]: first and second moments, to be changed and stored."""
        count = codes_2N.shape[1]
        index, found_2N = self._index[:count], self._moments[:, :count]
        for values, codes, scales, found in zip(self._maps, codes_2N, scales_2B, found_2N):
            index.copy_(codes)
            torch.index_select(values, 0, index, out=found)
            found.view(-1, BLOCK).mul_(scales[:, None])
        return found_2N

    def store(self, codes_2N: torch.Tensor, scales_2B: torch.Tensor) -> None:
        """What `load` gave, as it is now, becomes codes and scales."""
        count = codes_2N.shape[1]
        shares, index, peaks = self._shares[:count], self._index[:count], self._peaks[: count // BLOCK]
        for edges, codes, scales, values in zip(self._edges, codes_2N, scales_2B, self._moments[:, :count]):
            torch.abs(values, out=shares)
            torch.amax(shares.view(-1, BLOCK), 1, out=peaks)
            scales.copy_(peaks)
            peaks.copy_(scales).clamp_(min=self._tiny)  # as it will be read; a block of zeros is divided by something
            torch.div(values.view(-1, BLOCK), peaks[:, None], out=shares.view(-1, BLOCK))
            torch.bucketize(shares, edges, out_int32=True, out=index)
            codes.copy_(index)
