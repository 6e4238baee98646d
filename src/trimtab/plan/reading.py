"""What reading a model's weights takes, which is more than having them: they pass through host memory, and what is stored in
fewer bits is widened on the way. A model that is too large for the machine once it is, is refused here, before it is read.
"""

from __future__ import annotations

from trimtab.base.errors import ConfigError, Problem
from trimtab.base.units import GIB
from trimtab.config.run import Run
from trimtab.model.sizes import READ_CHUNK_ELEMENTS, READ_THREADS
from trimtab.plan.job import Job, Machine
from trimtab.plan.states import largest_unit

READING, WIDENING = "weights being read", "weights being dequantised"


def reading_bytes(job: Job, machine: Machine) -> dict[str, int]:
    """Host memory that is needed until the weights are on the device."""
    found = {} if machine.cpu else {READING: job.shape.parameters * job.itemsize}
    if job.stored is not None:  # values in float32, the scale of each, and their product
        found[WIDENING] = READ_THREADS * 12 * min(READ_CHUNK_ELEMENTS, largest_unit(job.shape))
    return found


def refuse_reading(run: Run, job: Job, machine: Machine) -> None:
    """Raises where dequantised weights alone fill all devices, or the host's memory. Other weights are the plan's to count."""
    if job.stored is None:
        return
    size, devices = job.shape.parameters * job.itemsize, machine.devices if run.devices == "auto" else run.devices
    device = machine.host_memory if machine.cpu else machine.device.memory * devices
    device = min(device, run.memory * devices) if run.memory is not None else device
    over = next((have for have in (device, machine.host_memory) if size > have), None)
    if over is None:
        return
    where = (
        "the host has"
        if machine.cpu or over != device
        else f"{devices} devices have"
        if devices > 1
        else "the device has"
    )
    what = (
        f"the weights are stored in {job.stored} and are dequantised on loading: {job.shape.parameters / 1e9:.1f} billion "
        f"parameters then take {size / GIB:.1f} GiB, and {where} {over / GIB:.1f} GiB"
    )
    raise ConfigError([Problem("model.path", what, "Use a smaller model, or a machine with more memory.")])
