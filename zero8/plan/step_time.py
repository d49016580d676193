# SPDX-License-Identifier: Apache-2.0
"""The bytes that the optimizer's step moves, and its time.

A step over data in memory takes

    ns/param = max(ns of one core / cores, bytes per parameter / bandwidth)
"""

from collections.abc import Sequence
from dataclasses import dataclass

from zero8.plan.model import Model
from zero8.plan.setup import Setup
from zero8.plan.share import Share, share_of

RECORD = "benchmarks/records/plan_cpu_202611.md"
RECORDED_CORE_NS = {4: (1.635, 1.092), 2: (1.635, 1.239)}
"""ns/param of one core of the Xeon with AVX-512 in `RECORD`, by bytes of a master weight."""


@dataclass(frozen=True)
class Hardware:
    """The hardware of a run; the default is an assumed host.

    Attributes:
        cores: of a host.
        gb_per_s: memory bandwidth of a host, reads and writes together.
        core_ns: ns/param of one core for an fp32 Adam and for zero8, over data in memory; None for
            `RECORDED_CORE_NS`.
        nvme_gb_per_s: of all drives of a host together; None if nothing is offloaded there.
    """

    cores: int = 64
    gb_per_s: float = 200.0
    core_ns: Sequence[float] | None = None
    nvme_gb_per_s: float | None = None

    def core_ns_of(self, setup: Setup) -> float:
        """Return ns/param of one core for an optimizer."""
        return (self.core_ns or RECORDED_CORE_NS[setup.master_bytes])[setup.is_8bit]


@dataclass(frozen=True)
class Step:
    """What a rank moves in a step, and the step's time.

    Attributes:
        memory_bytes: read and written by the optimizer: it reads gradients, and reads and writes
            weights and moments.
        link_bytes: between GPU and host: gradients down, weights up.
        nvme_bytes: read from NVMe, and as many written.
        seconds: of all ranks of a host; None on a GPU, for Muon, whose products of matrices take
            most of it, and for INT8 weights, whose rounding has not been measured.
        limit: the bottleneck: `cores`, `memory` or `NVMe`; None without a time.
    """

    memory_bytes: int
    link_bytes: int
    nvme_bytes: int
    seconds: float | None = None
    limit: str | None = None


def step_of(model: Model, setup: Setup, on: Hardware) -> Step:
    """Return the step of one optimizer."""
    share = share_of(model, setup)
    grad_bytes = setup.grad_bytes * share.numel
    state_bytes = share.moments_bytes + setup.correction_bytes * share.numel
    memory_bytes = 2 * share.weight_bytes + grad_bytes + 2 * state_bytes
    nvme_bytes = 0
    if setup.offload == "nvme":
        # DeepSpeed swaps gradients, zero8 keeps only sums of them there.
        has_grads = not setup.is_8bit or setup.accumulation_steps > 1
        nvme_bytes = share.weight_bytes + grad_bytes * has_grads + state_bytes
    moved = memory_bytes, _link_bytes(setup, share, grad_bytes), nvme_bytes
    if setup.offload == "none" or setup.algorithm.is_of_matrices or setup.has_int8_weights:
        return Step(*moved)
    ranks = setup.ranks_here
    limits = {
        "cores": ranks * share.numel * on.core_ns_of(setup) / on.cores / 1e9,
        "memory": ranks * memory_bytes / on.gb_per_s / 1e9,
    }
    limit, seconds = max(limits.items(), key=lambda item: item[1])
    if setup.offload == "nvme":
        nvme_seconds = 2 * ranks * nvme_bytes / on.nvme_gb_per_s / 1e9
        limit = "NVMe" if nvme_seconds > seconds else limit
        overlaps = setup.is_8bit or setup.pipelined  # zero8's always do
        seconds = max(seconds, nvme_seconds) if overlaps else seconds + nvme_seconds
    return Step(*moved, seconds, limit)


def _link_bytes(setup: Setup, share: Share, grad_bytes: int) -> int:
    if setup.offload == "none":
        return 0
    if setup.engine == "fsdp2":  # it casts weights on the GPU, after they have crossed the link
        return grad_bytes + share.weight_bytes
    micro_batches = setup.accumulation_steps
    # Stage 3 sends a gradient to its partition in each micro-batch, and fetches it for the step or
    # the next sum; stage 2 does so with sums only.
    crossings = {1: 0, 2: 2 * micro_batches - 1 if micro_batches > 1 else 0, 3: 2 * micro_batches}
    return grad_bytes + (crossings[setup.stage] + 1) * setup.weight_bytes * share.numel
