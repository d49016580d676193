# SPDX-License-Identifier: Apache-2.0
"""The time of the step and of the passes around it; the cores that saturate the memory.

A step over data in memory takes, by equation (B1) of `zero8.bench.step.machines`,

    ns/param = max(ns of one core / cores, bytes per parameter / bandwidth)

with ns of one core measured on a single thread over data in memory.  The passes that engines make
around it are limited by the memory.  With states on NVMe the time
of transfers is added or, if transfers and steps overlap, is a lower bound.
"""

from dataclasses import dataclass

from zero8.bench.step.machines import Machine
from zero8.plan.model import Model
from zero8.plan.rates import Rates
from zero8.plan.setup import Setup
from zero8.plan.share import share_of
from zero8.plan.traffic import Traffic, traffic_of


@dataclass(frozen=True)
class Hardware:
    """The hardware of a run.

    Attributes:
        host: cores and memory bandwidth of a host.
        rates: the speed of one core.
        nvme_gb_per_s: of all drives of a host together, for reading and for writing; None if
            nothing is offloaded there.
        gpu_gb_per_s: memory bandwidth of a GPU.
    """

    host: Machine
    rates: Rates
    nvme_gb_per_s: float | None
    gpu_gb_per_s: float


@dataclass(frozen=True)
class StepTime:
    """The time of an optimizer's step.

    Attributes:
        seconds: estimated.
        phase_seconds: with the passes around it; the same on a GPU, where these are not counted.
        limit: the bottleneck: `cores`, `memory`, `NVMe` or `GPU memory`.
        saturating_cores: the number of cores that saturate a host's memory; None on a GPU.
    """

    seconds: float
    phase_seconds: float
    limit: str
    saturating_cores: float | None


def step_times(model: Model, setup: Setup, hardware: Hardware) -> tuple[StepTime, StepTime] | None:
    """Return the times with an fp32 Adam and with zero8; None if their rates are unknown."""
    if setup.algorithm.is_of_matrices or setup.has_int8_weights:
        return None
    numel = share_of(model, setup).numel
    rates = hardware.rates.of(setup.master_bytes)
    fp32, zero8 = (
        _step_time(setup, hardware, numel, traffic, rate)
        for traffic, rate in zip(traffic_of(model, setup), rates, strict=True)
    )
    return fp32, zero8


def _step_time(
    setup: Setup, hardware: Hardware, numel: int, traffic: Traffic, rate: float
) -> StepTime:
    if setup.offload == "none":
        # A lower bound: the kernels' share of the bandwidth has not been measured.
        seconds = traffic.step_bytes / hardware.gpu_gb_per_s / 1e9
        return StepTime(seconds, seconds, "GPU memory", None)
    bytes_per_param = traffic.step_bytes / numel
    cores = hardware.host.saturating_cores(rate, bytes_per_param)
    seconds = setup.ranks_here * numel * hardware.host.ns_per_param(rate, bytes_per_param) / 1e9
    passes_seconds = setup.ranks_here * traffic.passes_bytes / hardware.host.gb_per_s / 1e9
    limit = "cores" if cores > hardware.host.cores else "memory"
    if setup.offload != "nvme":
        return StepTime(seconds, seconds + passes_seconds, limit, cores)
    nvme_bytes = setup.ranks_here * (traffic.nvme_read_bytes + traffic.nvme_write_bytes)
    nvme_seconds = nvme_bytes / hardware.nvme_gb_per_s / 1e9
    limit = "NVMe" if nvme_seconds > seconds else limit
    joined = max if setup.pipelined else lambda a, b: a + b
    seconds = joined(seconds, nvme_seconds)
    return StepTime(seconds, seconds + passes_seconds, limit, cores)
