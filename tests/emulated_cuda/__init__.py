"""A CUDA device played by the CPU, so that code for GPUs is run where there is none.

What is played: tensors of device "cuda" are CPU tensors whose storage is marked (memory.py); every operation is looked at on its
way to the CPU (operations.py), so that one which mixes device and host, waits for the host inside a graph, touches memory that is
lent or reads what has not arrived is an error, as on a GPU; `torch.cuda` has streams, events, graphs and memory that runs out
(runtime.py, graphs.py); the driver's virtual memory lends and takes back (driver.py); Triton's kernels run in its interpreter,
whose gaps are mended (kernels.py). Numbers are the CPU's: float32 runs may be compared closely with runs on the plain CPU.

What is not: time, several devices, races between streams (work is done in the order of its launch), compilation of kernels.

    with emulated_cuda.installed(capability=(9, 0), total_memory=2 * 2**30) as device:
        device.fail_allocation(7)

`EMULATE_CUDA=9.0 python -m pytest tests/gpu` installs it for the whole session (tests/conftest.py).
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from emulated_cuda import attributes, driver, kernels, operations, runtime
from emulated_cuda.memory import DeviceMemory
from emulated_cuda.patches import Patches

GIB = 2**30
current: DeviceMemory | None = None
"""The device that is played now."""


@contextmanager
def installed(capability: tuple[int, int] = (9, 0), total_memory: int = 4 * GIB) -> Iterator[DeviceMemory]:
    """While it is open, this process has one CUDA device. What was made on it must not be used afterwards."""
    global current
    assert current is None, "a device is played already"
    device = DeviceMemory(total_memory)
    patches = Patches()
    _forget_what_is_known_of_devices()
    state = operations.State(device)
    try:
        attributes.install(patches, state)
        runtime.install(patches, state, capability)
        driver.install(patches, state)
        kernels.install(patches, state, capability)
        operations.install(patches, state)
        current = device
        yield device
    finally:
        current = None
        gc.collect()
        patches.undo()
        _forget_what_is_known_of_devices()


def _forget_what_is_known_of_devices() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("trimtab.") and module is not None:
            for value in list(vars(module).values()):
                if callable(getattr(value, "cache_clear", None)) and getattr(value, "__module__", None) == name:
                    value.cache_clear()
