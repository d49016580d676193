# SPDX-License-Identifier: Apache-2.0
"""Checks whether a run fits into the memory of its hosts and GPUs, and finds changes that help."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from zero8.plan.memory import GPU, HOST, rows_of, total
from zero8.plan.model import Model
from zero8.plan.setup import Setup, counted

MOST_CHANGES = 6
"""The most changes reported."""

MOST_DOUBLINGS = 10
"""The most doublings of the number of ranks that are tried."""


@dataclass(frozen=True)
class Limits:
    """Bytes of memory of a host and of a GPU; None if unknown."""

    host_bytes: int | None
    gpu_bytes: int | None


@dataclass(frozen=True)
class Need:
    """Bytes that a run needs on each host and on each GPU with one optimizer."""

    host_bytes: int
    gpu_bytes: int

    def fits(self, limits: Limits) -> bool:
        """Return whether all known limits hold."""
        pairs = (self.host_bytes, limits.host_bytes), (self.gpu_bytes, limits.gpu_bytes)
        return all(limit is None or need <= limit for need, limit in pairs)


@dataclass(frozen=True)
class Change:
    """A change of settings that makes a run fit.

    Attributes:
        what: a description, with its options.
        need: with zero8, after the change.
    """

    what: str
    need: Need


def needs(model: Model, setup: Setup) -> tuple[Need, Need]:
    """Return the needs with an fp32 Adam and with zero8."""
    rows, ranks = rows_of(model, setup), setup.ranks_here
    pairs = zip(total(rows, HOST), total(rows, GPU), strict=True)
    fp32, zero8 = (Need(ranks * host, gpu) for host, gpu in pairs)
    return fp32, zero8


@dataclass(frozen=True)
class Verdict:
    """Whether a run fits.

    Attributes:
        limits: the available memory.
        fp32_adam: the need with an fp32 Adam.
        zero8: the need with zero8.
        changes: changes that make zero8 fit, if it does not.
    """

    limits: Limits
    fp32_adam: Need
    zero8: Need
    changes: tuple[Change, ...]


def verdict(model: Model, setup: Setup, limits: Limits) -> Verdict:
    """Return whether a run fits, and if not, single changes that help, or else pairs."""
    fp32_adam, zero8 = needs(model, setup)
    if zero8.fits(limits):
        return Verdict(limits, fp32_adam, zero8, ())
    changes = list(_single_changes(setup))
    found = [*_fitting(model, setup, limits, changes), *_more_ranks(model, setup, limits)]
    if not found:
        found += _fitting(model, setup, limits, _pairs(changes))
        for what, attributes in changes:
            found += _more_ranks(model, replace(setup, **attributes), limits, f"{what} and ")
    return Verdict(limits, fp32_adam, zero8, tuple(found[:MOST_CHANGES]))


def _pairs(changes: list[tuple[str, dict]]) -> Iterator[tuple[str, dict]]:
    for (first, one), (second, other) in combinations(changes, 2):
        if all(one[key] == other[key] for key in one.keys() & other.keys()):
            yield f"{first} and {second}", one | other


def _single_changes(setup: Setup) -> Iterator[tuple[str, dict]]:
    """Yield possible changes: a description, and the attributes of `Setup` to set."""
    if setup.offload == "none":
        stage = setup.stage or 2
        options = f"--offload cpu --stage {stage}" if setup.stage == 0 else "--offload cpu"
        yield f"states in host memory ({options})", {"offload": "cpu", "stage": stage}
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
    if not setup.offload_params:
        params = {"stage": 3, "offload_params": True}
        yield 'weights in host memory (stage 3 with "offload_param" in --ds-config)', params
    if setup.dtype != "fp16" and setup.offload != "nvme":
        yield (
            "FSDP2, without the weights that layers gather (--engine fsdp2)",
            {"engine": "fsdp2", "offload_params": False},
        )


def _fitting(model: Model, setup: Setup, limits: Limits, changes) -> Iterator[Change]:
    for what, attributes in changes:
        try:
            changed = replace(setup, **attributes)
        except ValueError:  # incompatible settings
            continue
        _, need = needs(model, changed)
        if need.fits(limits):
            yield Change(what, need)


def _more_ranks(model: Model, setup: Setup, limits: Limits, before: str = "") -> Iterator[Change]:
    """Yield the smallest doubled number of ranks that fits; `before` is the description's start."""
    counts = [setup.world_size * 2**power for power in range(1, 1 + MOST_DOUBLINGS)]
    needed = lru_cache(lambda count: needs(model, replace(setup, world_size=count))[1])
    if not needed(counts[-1]).fits(limits):
        return
    count = next(count for count in counts if needed(count).fits(limits))
    hosts = -(-count // setup.ranks_per_host)
    what = f"{before}{count} ranks on {counted(hosts, 'host')} (--world-size {count})"
    yield Change(what, needed(count))
