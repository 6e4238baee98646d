"""Weights in codes: the layouts of the libraries that write them, products by tiles and whole, and layers that compute with what
the codes stand for and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from trimtab.model.codes import FP8_MOST, NF4, QuantisedLinear, quantised

SIZES = [(128, 256), (130, 200), (7, 5), (64, 192), (33, 129)]


def linear(outputs: int, inputs: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(outputs + inputs)
    made = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    with torch.no_grad():
        made.weight.mul_(torch.linspace(0.1, 8.0, outputs)[:, None])  # blocks of different sizes
        made.weight[0] = 0.0
    return made


def by_hand(made: QuantisedLinear) -> np.ndarray:
    """What codes and scales say, element by element."""
    out = np.zeros((made.out_features, made.in_features))
    codes, scale = made.weight.numpy(), made.scale.numpy().astype(np.float64)
    for o in range(made.out_features):
        for i in range(made.in_features):
            if made.kind == "fp8":
                code = int(codes[o, i])
                sign, exponent, mantissa = -1.0 if code >> 7 else 1.0, code >> 3 & 15, code & 7
                value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
                out[o, i] = sign * value * scale[o // 128, i // 128]
            else:
                at = o * made.in_features + i
                code = int(codes[at // 2]) >> 4 if at % 2 == 0 else int(codes[at // 2]) & 15
                out[o, i] = NF4[code] * scale[at // 64]
    return out


@pytest.mark.parametrize("kind", ["fp8", "4bit"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_codes_are_as_documented_and_nearest(kind, size) -> None:
    plain = linear(*size)
    made = quantised(plain, kind)
    found, exact = by_hand(made), plain.weight.detach().double().numpy()
    np.testing.assert_allclose(made.dequantised(torch.float64).numpy(), found, rtol=1e-6, atol=0)
    if kind == "fp8":
        scale = made.scale.repeat_interleave(128, 0)[: size[0]].repeat_interleave(128, 1)[:, : size[1]].double().numpy()
        error = np.abs(found - exact) / np.maximum(np.abs(exact), scale * 2.0**-6)
        assert error.max() <= 2.0**-4 + 1e-6, "half a step of three bits of mantissa"
        assert np.abs(exact / scale).max() <= FP8_MOST * (1 + 1e-6)
        assert made.scale.shape == (-(-size[0] // 128), -(-size[1] // 128))
    else:
        scale = made.scale.repeat_interleave(64)[: exact.size].double().numpy().reshape(exact.shape)
        relative = np.divide(exact, scale, out=np.zeros_like(exact), where=scale > 0)
        nearest = np.abs(relative[..., None] - np.array(NF4)).min(-1)
        np.testing.assert_allclose(np.abs(found / np.maximum(scale, 1e-30) - relative), nearest, atol=1e-6)
        assert made.weight.shape == (-(-exact.size // 2),)


@pytest.mark.parametrize("kind", ["fp8", "4bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_layer_is_the_plain_layer_of_its_dequantised_weight(kind, dtype) -> None:
    made = quantised(linear(130, 200, dtype), kind)
    plain = nn.Linear(200, 130, dtype=dtype)
    plain.weight.data, plain.bias.data = made.dequantised(), made.bias.data
    assert made.dequantised().dtype is dtype
    x = torch.randn(2, 3, 200, dtype=dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    out, expected = made(ours), plain(theirs)
    close = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(out, expected, rtol=close, atol=close * 10)
    weights = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
    (out * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=close, atol=close * 10)
    assert made.weight.grad is None


def test_kernels_by_tiles_and_whole_give_the_plain_codes_product() -> None:
    """In Triton's interpreter without a GPU: every code of e4m3 but NaN, odd widths, both directions."""
    pytest.importorskip("triton")
    from trimtab.model.kernels import quantised as kernels

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for kind, size in [("fp8", (130, 200)), ("4bit", (33, 129)), ("4bit", (64, 192))]:
        made = quantised(linear(*size), kind)
        if kind == "fp8":
            every = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
            made.weight.view(-1)[: len(every)] = every
        expected = torch.from_numpy(by_hand(made))
        made.to(device)
        whole = kernels.dequantise(made, torch.float32).cpu().double()
        torch.testing.assert_close(whole, expected, rtol=1e-6, atol=0)
        for back, inner in ((False, size[1]), (True, size[0])):
            x = torch.randn(5, inner, device=device)
            found = kernels.product(made, x, back=back).cpu().double()
            right = x.cpu().double() @ (expected if back else expected.t())
            torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-3)


def test_bitsandbytes_packs_four_bits_as_here() -> None:
    """A block by bitsandbytes' rules, by hand: the first of two in the high half, thresholds half-way between levels."""
    row = torch.zeros(1, 64)
    row[0, :4] = torch.tensor([2.0, -2.0, 0.08 * 2, -0.05 * 2])
    made = quantised(nn.Linear(64, 1, bias=False).requires_grad_(False), "4bit")
    plain = nn.Linear(64, 1, bias=False)
    plain.weight.data = row
    made = quantised(plain, "4bit")
    assert made.scale.tolist() == [2.0]
    assert made.weight[:3].tolist() == [0xF0, 0x86, 0x77]
