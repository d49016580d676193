# SPDX-License-Identifier: Apache-2.0
"""The bytes that each rank moves per step: in memory, over its GPU's link, on NVMe and network."""

import math
from dataclasses import dataclass

from zero8.plan.matrices import sent_by_deepspeed, sent_by_zero8
from zero8.plan.model import Model
from zero8.plan.setup import Setup
from zero8.plan.share import Share, share_of, weight_bytes


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank moves in a step with one optimizer.

    Attributes:
        step_bytes: read and written in memory by the optimizer: it reads gradients, and reads and
            writes weights and moments.  Of Muon its products of matrices are not counted.
        passes_bytes: the same by the passes around it: clipping, and 16-bit weights on their way to
            the model.  Not counted on a GPU.
        link_bytes: between GPU and host: gradients down, weights up.
        nvme_read_bytes: read from NVMe.
        nvme_write_bytes: written to it.
        network_bytes: sent to other ranks, over all micro-batches.
    """

    step_bytes: int
    passes_bytes: int
    link_bytes: int
    nvme_read_bytes: int
    nvme_write_bytes: int
    network_bytes: int


def traffic_of(model: Model, setup: Setup) -> tuple[Traffic, Traffic]:
    """Return the traffic with an fp32 Adam and with zero8."""
    share = share_of(model, setup)
    sent = (0, 0)
    if setup.algorithm.is_of_matrices:
        sent = sent_by_deepspeed(model, setup), sent_by_zero8(model, setup)
    zero8_bytes = share.zero8_bytes + setup.correction_bytes * share.numel
    fp32_passes, zero8_passes = _passes_bytes_per_param(setup)
    master, own = setup.master_bytes, setup.zero8_grad_bytes
    return (
        _with(model, setup, share, share.fp32_bytes, master, fp32_passes, sent[0]),
        _with(model, setup, share, zero8_bytes, own, zero8_passes, sent[1]),
    )


def _passes_bytes_per_param(setup: Setup) -> tuple[int, int]:
    """Return what the engine's passes around the step read and write, per parameter.

    With zero8 the step itself clips, and writes the 16-bit weights, except with states on NVMe.
    """
    weight, master = setup.weight_bytes, setup.master_bytes
    if setup.offload == "none":
        return 0, 0
    clipping, sent = 2 * master, weight
    if setup.engine == "fsdp2":  # one more read for the norm; master weights are sent
        return clipping + 2 * master, 2 * master
    if setup.stage < 3:
        return clipping + master + weight + sent, (weight if master != weight else 0) + sent
    # torch converts on the CPU before it sends to a GPU.
    converted = 0 if master == weight else master + weight
    copied_in_host = converted or 2 * weight
    copied = copied_in_host if setup.offload_params else converted + sent
    if setup.offload == "nvme":
        return clipping + copied, clipping + copied
    if not setup.offload_params:
        return clipping + copied, copied
    return clipping + copied, weight if master != weight else 0


def _with(
    model: Model,
    setup: Setup,
    share: Share,
    state_bytes: int,
    grad_bytes_per_param: int,
    passes_bytes_per_param: int,
    exchanged_bytes: int,
) -> Traffic:
    numel, master_bytes = share.numel, share.weight_bytes
    swapped = setup.offload == "nvme"
    # INT8 weights are read by one pass, and cross the link once, where there are passes and a link.
    saved = 0 if setup.offload == "none" else setup.master_bytes * numel - master_bytes
    return Traffic(
        step_bytes=2 * master_bytes + grad_bytes_per_param * numel + 2 * state_bytes,
        passes_bytes=passes_bytes_per_param * numel - saved,
        link_bytes=_link_bytes_per_param(setup, grad_bytes_per_param) * numel - saved,
        # Gradients are written in the backward, and read by the step.
        nvme_read_bytes=swapped * (2 * master_bytes + state_bytes),
        nvme_write_bytes=swapped * (2 * master_bytes + state_bytes),
        network_bytes=_network_bytes(model, setup) + exchanged_bytes,
    )


def _link_bytes_per_param(setup: Setup, grad_bytes: int) -> int:
    weight = setup.weight_bytes
    if setup.offload == "none":
        return 0
    if setup.engine == "fsdp2":  # it casts weights on the GPU, after they have crossed the link
        return 2 * setup.master_bytes
    micro_batches = setup.accumulation_steps
    # Stage 3 sends a gradient to its partition in each micro-batch, and fetches it for the step or
    # the next sum; stage 2 does so with sums only.
    crossings = {1: 0, 2: 2 * micro_batches - 1 if micro_batches > 1 else 0, 3: 2 * micro_batches}
    return crossings[setup.stage] * weight + grad_bytes + weight


def _network_bytes(model: Model, setup: Setup) -> int:
    """Return the bytes that a rank sends, in rings: everything but its own share."""
    sharded_weights = setup.engine == "fsdp2" or setup.stage == 3
    micro_batches = setup.accumulation_steps
    # Sharded weights are gathered for the forward and for the backward of each micro-batch.
    gathers = 2 * micro_batches if sharded_weights else 1
    reductions = micro_batches if setup.stage >= 2 or sharded_weights else 1
    gathered = sum(
        weight_bytes(param, math.prod(param[1]), setup, setup.weight_bytes)
        for param in model.params
    )
    moved = gathers * gathered + reductions * setup.weight_bytes * model.numel
    return moved * (setup.world_size - 1) // setup.world_size
