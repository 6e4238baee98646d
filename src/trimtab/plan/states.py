"""What a rank holds of the models, by component: weights, masters, moments and gradients, whole or in parts (placement.py).

Bytes a parameter in bfloat16: weights 2, gradients 4, masters 4, moments 8. Under `full` a rank's float32 part of a weight is its
master, and there is no other: layers are gathered in bfloat16 while they are used.
"""

from __future__ import annotations

from dataclasses import replace

from trimtab.config.known import ResolvedRun
from trimtab.model.sizes import BLOCK
from trimtab.plan.job import Job
from trimtab.plan.placement import Placement
from trimtab.plan.quantised import weight_bytes
from trimtab.plan.shape import ModelShape

GATHERED, BUFFERS, FROZEN = "gathered layers", "gradient buffers", "models that score"


def policy_and_critic(job: Job, run: ResolvedRun, place: Placement) -> dict[str, int]:
    """Bytes on a rank of all that stays between phases, and of the gradients."""
    whole_state = 1 if job.rank else place.state_parts  # adapters are whole on every rank
    elsewhere = place.generates_only and (run.external or place.tensor > 1)  # the engine's copy is the only one
    found = {} if masters_are_weights(job, place) or elsewhere else {"weights": _weights(job, place)}
    if job.rank:
        found["adapters"] = job.adapters * 4
    if job.reference and not run.offload.reference:
        found["reference"] = reference_bytes(job, place)
    if job.reward_models:
        found["reward models"] = sum(shape.parameters for shape in job.reward_models) * job.itemsize
    if job.frozen:
        nbytes = sum(shape.parameters for shape in job.frozen) * job.itemsize
        found[FROZEN] = _parts(nbytes, place.weight_parts)
    if job.critic is not None:
        critic = replace(job, shape=job.critic)
        in_float32 = masters_are_weights(critic, place)
        found["critic"] = (
            _parts(4 * job.critic.parameters, place.weight_parts) if in_float32 else _weights(critic, place)
        )
        found["critic"] += 4 * job.adapters if job.rank else 0
        if not run.offload.optimizer:
            state = moment_bytes(job, critic_trained(job)) if in_float32 else critic_state(job)
            found["critic's optimizer"] = _parts(state, whole_state)
    if job.trained:
        if not is_own_master(job) and (not run.offload.optimizer or masters_are_weights(job, place)):
            found["masters"] = _parts(4 * job.trained, whole_state)
        if not run.offload.optimizer:
            found["optimizer state"] = _parts(moment_bytes(job, job.trained), whole_state)
    found["gradients"] = gradient_bytes(job, job.trained, place)
    return found


def state_bytes(job: Job, place: Placement) -> int:
    """Bytes of weights, gradients, masters and moments of the policy on a rank, nothing of it elsewhere."""
    parts = 1 if job.rank else place.state_parts
    master = 0 if is_own_master(job) or masters_are_weights(job, place) else _parts(4 * job.trained, parts)
    return least_bytes(replace(job, generates=False), place) + master + _parts(moment_bytes(job, job.trained), parts)


def least_bytes(job: Job, place: Placement) -> int:
    """Bytes that a rank holds on its device in the update, whatever waits elsewhere; or in rollout, with the engine's own copy,
    where that is more."""
    one = weight_bytes(job)
    whole = 4 * job.shape.parameters if masters_are_weights(job, place) else one
    copy = 0 if place.shares_weights or not job.generates else _parts(one, place.tensor)
    held = 0 if place.generates_only and copy else _parts(whole, place.weight_parts)
    return held + max(gradient_bytes(job, job.trained, place), copy)


def engine_weights(job: Job, parts: int, external: bool) -> int:
    """Bytes of an engine's copy on each device that it is cut over. The native engine cuts all but the embedding."""
    whole = 0 if external or parts == 1 else job.shape.table
    return (whole + -(-(job.shape.parameters - whole) // parts)) * job.itemsize


def masters_are_weights(job: Job, place: Placement) -> bool:
    """A rank has float32 parts of the weights and no others; so masters stay on the device when moments leave it."""
    return place.shard == "full" and not is_own_master(job) and job.training


def gradient_bytes(job: Job, trained: int, place: Placement) -> int:
    return _parts(gradient_itemsize(job) * trained, 1 if job.rank else place.gradient_parts)


def reference_bytes(job: Job, place: Placement) -> int:
    return _parts(job.shape.parameters * job.itemsize, place.weight_parts)


def waiting_state_bytes(job: Job, place: Placement) -> int:
    """Bytes of what a rank keeps in host memory where its optimizer state waits there."""
    parts = 1 if job.rank else place.state_parts
    if masters_are_weights(job, place):
        return _parts(moment_bytes(job, job.trained) + moment_bytes(job, critic_trained(job)), parts)
    return _parts(optimizer_bytes(job) + critic_state(job), parts)


def gathered_bytes(job: Job, place: Placement) -> dict[str, int]:
    """What `full` gathers: this layer and the next, a layer's gradient, and embedding and head throughout."""
    if place.weight_parts == 1:
        return {}
    ends = job.shape.table * (1 if job.shape.tied else 2)
    largest = max(block.parameters for block in job.shape.kinds)
    return {GATHERED: (2 * largest + ends) * job.itemsize + (0 if job.rank else 4 * largest)}


def buffer_bytes(job: Job, place: Placement) -> dict[str, int]:
    """What `gradients` needs while a backward pass runs: the sums of two units, one that is filled and one that is scattered."""
    if place.shard != "gradients" or job.rank:
        return {}
    return {BUFFERS: 2 * gradient_itemsize(job) * largest_unit(job.shape)}


def largest_unit(shape: ModelShape) -> int:
    """Parameters of the largest unit: a layer, the embedding or the head."""
    return max(shape.table, *(block.parameters for block in shape.kinds))


def _weights(job: Job, place: Placement) -> int:
    return _parts(weight_bytes(job), place.weight_parts)


def _parts(nbytes: int, parts: int) -> int:
    return -(-nbytes // parts)


def optimizer_bytes(job: Job) -> int:
    """Bytes of two moments, and of float32 masters where the weights are not their own masters."""
    return _state_bytes(job, job.trained)


def critic_state(job: Job) -> int:
    """Bytes of the critic's masters and moments. It is trained as the policy is: whole, or by adapters of the same rank."""
    return _state_bytes(job, critic_trained(job))


def _state_bytes(job: Job, count: int) -> int:
    return moment_bytes(job, count) + (0 if is_own_master(job) else 4 * count)


def moment_bytes(job: Job, count: int) -> int:
    """Bytes of two moments for each of `count` elements; in 8 bits, each block also has a scale in float32."""
    return 2 * (count + 4 * -(-count // BLOCK)) if job.eight_bit else 2 * gradient_itemsize(job) * count


def critic_trained(job: Job) -> int:
    return 0 if job.critic is None else job.adapters if job.rank else job.critic.parameters


def gradient_itemsize(job: Job) -> int:
    """Bytes of an element of moments and gradients."""
    return 4 if job.rank else max(4, job.itemsize)


def is_own_master(job: Job) -> bool:
    return job.itemsize >= 4 or job.rank > 0
