# SPDX-License-Identifier: Apache-2.0
"""Checks whether a run fits into the memory of its hosts and GPUs, and what changes would do."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from zero8.plan.memory import rows_of, total
from zero8.plan.model import Model
from zero8.plan.setup import GPU, HOST, Setup, counted


@dataclass(frozen=True)
class Memory:
    """Bytes of each host and of each GPU: what a run needs, or what there is; None if unknown."""

    host_bytes: int | None
    gpu_bytes: int | None

    def fits(self, there: "Memory") -> bool:
        """Return whether this need is within what there is."""
        pairs = (self.host_bytes, there.host_bytes), (self.gpu_bytes, there.gpu_bytes)
        return all(limit is None or need <= limit for need, limit in pairs)


def needs(model: Model, setup: Setup) -> tuple[Memory, Memory]:
    """Return the needs with an fp32 Adam and with zero8."""
    rows, ranks = rows_of(model, setup), setup.ranks_here
    pairs = zip(total(rows, HOST), total(rows, GPU), strict=True)
    fp32, zero8 = (Memory(ranks * host, gpu) for host, gpu in pairs)
    return fp32, zero8


def cases_of(model: Model, setup: Setup, there: Memory) -> list[tuple[str, Memory]]:
    """Return the needs of both optimizers, and of zero8 after each change if it is too much."""
    fp32, zero8 = setup.optimizers
    cases = list(zip((fp32, zero8), needs(model, setup), strict=True))
    if cases[1][1].fits(there):
        return cases
    for what, attributes in _changes(setup):
        try:
            changed = replace(setup, **attributes)
        except ValueError:  # incompatible settings
            continue
        cases.append((f"{zero8}, {what}", needs(model, changed)[1]))
    for count in (setup.world_size * 2**power for power in range(1, 11)):
        need = needs(model, replace(setup, world_size=count))[1]
        if need.fits(there):
            hosts = counted(-(-count // setup.ranks_per_host), "host")
            return [*cases, (f"{zero8}, {count} ranks on {hosts} (--world-size {count})", need)]
    return cases


def _changes(setup: Setup) -> Iterator[tuple[str, dict]]:
    """Yield descriptions of changes, and for each the attributes of `Setup` to set."""
    if setup.offload == "none":
        stage = setup.stage or 2
        offload = {"offload": "cpu", "stage": stage}
        yield f"states in host memory (--offload cpu --stage {stage})", offload
    if setup.master_bytes == 4 and setup.dtype != "fp32":
        yield "24-bit master weights (--dtype 24-bit-masters)", {"dtype": "24-bit-masters"}
        yield "bfloat16 master weights (--dtype bf16-masters)", {"dtype": "bf16-masters"}
    if setup.engine != "deepspeed":
        return
    if setup.stage < 3:
        yield "ZeRO stage 3 (--stage 3)", {"stage": 3}
    if setup.offload != "nvme":
        nvme = {"stage": 3, "offload": "nvme"}
        yield "states on NVMe (--stage 3 --offload nvme)", nvme
        fsdp2 = {"engine": "fsdp2", "offload_params": False}
        yield "FSDP2, without the weights that layers gather (--engine fsdp2)", fsdp2
    if not setup.offload_params:
        params = {"stage": 3, "offload_params": True}
        yield 'weights in host memory (stage 3 with "offload_param" in --ds-config)', params
