"""How fast a device could be: its ceilings, measured, and the least time of a rollout, counted."""

from __future__ import annotations

from typing import Any


def event_seconds(work: Any, repeats: int = 5) -> list[float]:
    """How long a few calls took the device, each by events around it."""
    import torch

    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return times


def ceilings() -> dict[str, float]:
    """Measured: bf16 matrix product in FLOP/s, device copy in bytes (read plus written) a second."""
    import torch

    torch.cuda.empty_cache()
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    flops = 2 * 8192**3 / min(event_seconds(lambda: a @ a))
    x, y = (torch.empty(2**30, device="cuda", dtype=torch.uint8) for _ in range(2))
    return {"flops_per_s": flops, "bytes_per_s": 2 * 2**30 / min(event_seconds(lambda: y.copy_(x)))}


def roofline(shape: dict[str, Any], lengths: list[int], prompt: int, samples: int, ceilings: dict[str, float]) -> float:
    """Seconds below which no engine can be, with every sequence started at once.

    A step's products and its attention depend on each other, so their times add up; within each, reading and arithmetic overlap,
    so the longer counts.
    """
    h, layers, heads = shape["hidden_size"], shape["num_hidden_layers"], shape["num_attention_heads"]
    kv, size = shape["num_key_value_heads"], shape.get("head_dim") or h // heads
    layer = h * size * (2 * heads + 2 * kv) + 3 * h * shape["intermediate_size"]
    matrices = layers * layer + h * shape["vocab_size"]
    kv_bytes = 2 * layers * kv * size * 2
    bandwidth, rate = ceilings["bytes_per_s"], ceilings["flops_per_s"]
    groups = [lengths[i : i + samples] for i in range(0, len(lengths), samples)]
    seconds = 2 * layers * layer * prompt * len(groups) / rate
    for step in range(1, max(lengths)):
        live = sum(n > step for n in lengths)
        prompts = sum(any(n > step for n in g) for g in groups)
        seconds += max(2 * matrices / bandwidth, 2 * matrices * live / rate)
        attention = 4 * layers * heads * size * live * (prompt + step)
        seconds += max(kv_bytes * (prompts * prompt + live * step) / bandwidth, attention / rate)
    return seconds
