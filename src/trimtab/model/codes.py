"""Weights of linear layers in 8 or 4 bits, frozen under adapters: how they are stored, and layers that compute with them.

Layouts, both those of the libraries that write such checkpoints:

    fp8     codes [O, I] uint8, the bits of float8 e4m3      scale [ceil(O / 128), ceil(I / 128)] float32
            weight = code * scale of its block: DeepSeek's and transformers' `weight_scale_inv`
    4bit    codes [ceil(O I / 2)] uint8, two a byte, the first in the high half, over the matrix row after row
            scale [ceil(O I / 64)] float32, the largest absolute value of each 64, and 16 levels: bitsandbytes' NF4
            weight = levels[code] * scale of its block

Guarantees: engine and trainer compute with the same tensors, which are in memory once. What a layer computes with is
`dequantised()`: the product of code and scale in float32, rounded once to the model's type; every path gives that product up to
the order of sums, forward and for the gradient of the input. Any width is served: a block at an edge is cut. A quantised weight
has no gradient, and the codes do not depend on the device that made them.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from trimtab.model.sizes import FOUR_BIT_BLOCK, FP8_BLOCK, MAX_QUANTISED_ELEMENTS

Kind = Literal["fp8", "4bit"]
FP8_MOST = 448.0
"""The largest number of e4m3."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution (Dettmers et al. 2023, arXiv 2305.14314), as bitsandbytes has them."""


class QuantisedLinear(nn.Linear):
    """A linear layer whose weight is stored in codes. It is an nn.Linear for PEFT, which puts adapters beside it."""

    def __init__(
        self, kind: Kind, shape: tuple[int, int], codes: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None,
        dtype: torch.dtype, levels: torch.Tensor | None = None, block: tuple[int, int] = (FP8_BLOCK, FP8_BLOCK),
    ) -> None:  # fmt: skip
        """`dtype`: the model's. `levels`: of 4 bits. `block`: rows and columns that share a scale in 8 bits."""
        nn.Module.__init__(self)
        self.kind, self.computes_in = kind, dtype
        self.out_features, self.in_features = shape
        self.block = block
        self.levels: nn.Parameter | None = None
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)
        if bias is None:
            self.register_parameter("bias", None)
        else:
            self.bias = nn.Parameter(bias, requires_grad=False)
        if kind == "4bit":
            del self.levels
            levels = torch.tensor(NF4) if levels is None else levels
            self.levels = nn.Parameter(levels.to(codes.device), requires_grad=False)

    @property
    def count(self) -> int:
        """Elements of the weight."""
        return self.out_features * self.in_features

    @torch.no_grad()
    def dequantised(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The weight [O, I] that the layer computes with."""
        dtype = dtype or self.computes_in
        if self.weight.is_cuda:
            from trimtab.model.kernels import quantised as kernels

            return kernels.dequantise(self, dtype)
        if self.kind == "fp8":
            rows, columns = self.block
            scale = self.scale.repeat_interleave(rows, 0)[: self.out_features]
            scale = scale.repeat_interleave(columns, 1)[:, : self.in_features]
            return (self.weight.view(torch.float8_e4m3fn).float() * scale).to(dtype)
        codes = torch.stack((self.weight >> 4, self.weight & 15), 1).flatten()[: self.count]
        assert self.levels is not None
        values = self.levels.index_select(0, codes.int())
        scale = self.scale.repeat_interleave(FOUR_BIT_BLOCK)[: self.count]
        return (values * scale).view(self.out_features, self.in_features).to(dtype)

    @torch.no_grad()
    def product(self, x_TI: torch.Tensor, out_TO: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T, without the bias."""
        if self._has_kernel(x_TI):
            from trimtab.model.kernels import quantised as kernels

            return kernels.product(self, x_TI, out_TO)
        return torch.mm(x_TI, self.dequantised(x_TI.dtype).t(), out=out_TO)

    @torch.no_grad()
    def input_gradient(self, dout_TO: torch.Tensor) -> torch.Tensor:
        """The gradient of x, given that of x W^T."""
        if self._has_kernel(dout_TO):
            from trimtab.model.kernels import quantised as kernels

            return kernels.product(self, dout_TO, back=True)
        return torch.mm(dout_TO, self.dequantised(dout_TO.dtype))

    def _has_kernel(self, x: torch.Tensor) -> bool:
        """Few rows: a kernel reads the codes once and makes each tile of the weight where it is used. For many rows the weight is
        made whole, one matrix at a time, which costs little beside the product."""
        if not x.is_cuda or x.dtype == torch.float64:
            return False
        from trimtab.model.kernels import quantised as kernels

        return x.shape[0] <= kernels.MAX_ROWS

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _Product.apply(x, self)
        return out if self.bias is None else out + self.bias

    @property
    def stored(self) -> list[str]:
        """The tensors that stand for the weight, by name."""
        return [name for name, _ in self.named_parameters(recurse=False) if name != "bias"]

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, {self.kind}"


class _Product(torch.autograd.Function):
    """Keeps nothing for the backward pass: the codes are there."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, linear: QuantisedLinear) -> torch.Tensor:
        ctx.linear = linear
        return linear.product(x.flatten(0, -2)).view(*x.shape[:-1], linear.out_features)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (dout,) = grads
        dx = ctx.linear.input_gradient(dout.flatten(0, -2))
        return dx.view(*dout.shape[:-1], ctx.linear.in_features), None


@torch.no_grad()
def quantised(linear: nn.Linear, kind: Kind, device: torch.device | None = None) -> QuantisedLinear:
    """The layer with its weight in codes, made on `device` and left there."""
    weight = linear.weight.to(device or linear.weight.device)
    codes, scale = _to_fp8(weight) if kind == "fp8" else _to_4bit(weight)
    bias = None if linear.bias is None else linear.bias.data.to(weight.device)
    return QuantisedLinear(kind, (weight.shape[0], weight.shape[1]), codes, scale, bias, linear.weight.dtype)


def _to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = [], []
    rows = max(FP8_BLOCK, MAX_QUANTISED_ELEMENTS // weight.shape[1] // FP8_BLOCK * FP8_BLOCK)
    for part in weight.split(rows):
        high, wide = part.shape
        padded = F.pad(part.float(), (0, -wide % FP8_BLOCK, 0, -high % FP8_BLOCK))
        blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))  # [b, 128, c, 128]
        most = blocks.abs().amax((1, 3))
        scale = torch.where(most > 0, most / FP8_MOST, 1.0)
        found = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        codes.append(found.flatten(2).flatten(0, 1)[:high, :wide])
        scales.append(scale)
    return torch.cat(codes).contiguous(), torch.cat(scales)


def _to_4bit(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    levels = torch.tensor(NF4, device=weight.device)
    between = (levels[1:] + levels[:-1]) / 2
    codes, scales = [], []
    for part in weight.flatten().split(
        MAX_QUANTISED_ELEMENTS
    ):  # of which only the last may end within a block or a byte
        count = part.numel()
        blocks = F.pad(part.float(), (0, -count % FOUR_BIT_BLOCK)).view(-1, FOUR_BIT_BLOCK)
        scale = blocks.abs().amax(1)
        relative = blocks / torch.where(scale > 0, scale, 1.0)[:, None]
        found = torch.bucketize(relative, between, out_int32=True).to(torch.uint8).flatten()[: count + count % 2]
        codes.append((found[::2] << 4) | found[1::2])
        scales.append(scale)
    return torch.cat(codes), torch.cat(scales)


def quantised_names(model: nn.Module) -> list[str]:
    """The linear layers that are quantised: those of decoder layers. Embedding, norms and head are left alone."""
    decoder = model.get_decoder()  # type: ignore[operator]
    layers = {id(m) for layer in decoder.layers for m in layer.modules()}
    return [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and id(m) in layers]


def quantise_layers(model: nn.Module, kind: Kind, device: torch.device) -> None:
    """Put codes in the place of the weights of a model's decoder layers, one matrix after the other."""
    for name in quantised_names(model):
        put(model, name, quantised(model.get_submodule(name), kind, device))  # type: ignore[arg-type]


def put(model: nn.Module, name: str, linear: QuantisedLinear) -> None:
    """Put a layer in the place of the one of that name."""
    above, _, last = name.rpartition(".")
    setattr(model.get_submodule(above), last, linear)


def parameter_elements(model: nn.Module) -> int:
    """Parameters of a model: of a quantised weight, how many numbers it stands for."""
    codes = [m for m in model.modules() if isinstance(m, QuantisedLinear)]
    stored = {id(getattr(m, name)): m.count if name == "weight" else 0 for m in codes for name in m.stored}
    return sum(stored.get(id(p), p.numel()) for p in model.parameters())


def whole_weight(linear: nn.Linear) -> torch.Tensor:
    """The weight of a linear layer as it computes, a copy where it is stored in codes."""
    return linear.dequantised() if isinstance(linear, QuantisedLinear) else linear.weight


def codes_of(model: nn.Module) -> str:
    """How a model's layers are stored: plain, fp8 or 4bit."""
    return next((m.kind for m in model.modules() if isinstance(m, QuantisedLinear)), "plain")
