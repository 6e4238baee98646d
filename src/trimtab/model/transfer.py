"""Numbers on their way to a device."""

from __future__ import annotations

import torch


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device, without waiting for what runs there: from pinned memory, which is kept until it is read."""
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
