# SPDX-License-Identifier: Apache-2.0
"""The memory of a host: its nodes (NUMA), advice on its pages, and torch's page-locked memory."""

import ctypes
import mmap
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

UNROUNDED_MIB = 64
"""A threshold of rounding, above which what is not rounded is all that matters."""
UNROUNDED = f"PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:{UNROUNDED_MIB}"
"""The same, as an environment has it."""

SYSFS = Path("/sys")
_REMEDY = (
    "bind each rank to the node of its GPU (torchrun --numa-binding node, deepspeed "
    "--bind_cores_to_rank, numactl --cpunodebind); zero8 doctor, launched as the training is, "
    "checks each rank"
)


class Placement(NamedTuple):
    """The nodes of a process and its GPUs, as Linux's sysfs has them.

    A page is on the node of the thread that touches it first.  States, those that are loaded too,
    are written first in the shares of a step's threads.  What DeepSpeed and torch make is where the
    thread that made it ran: everything is near only to ranks whose threads are all on one node.

    Attributes:
        nodes: the host's nodes that have processors and memory.
        own: those of them on whose processors the process may run.
        gpus: the node of each of its GPUs, None where the host does not say it.
    """

    nodes: list[int]
    own: list[int]
    gpus: list[int | None]

    @classmethod
    def of(cls, processors: set[int], gpus: Sequence[str]) -> "Placement":
        """Return that of a process by its processors and the PCI addresses of its GPUs."""
        folder = SYSFS / "devices/system/node"
        numbers = sorted(_numbers(folder / "has_memory"))
        of_nodes = {node: _numbers(folder / f"node{node}/cpulist") for node in numbers}
        nodes = [node for node in numbers if of_nodes[node]]
        own = [node for node in nodes if of_nodes[node] & processors]
        return cls(nodes, own, [_node_of_gpu(SYSFS / "bus/pci/devices" / gpu) for gpu in gpus])

    def __str__(self) -> str:
        """Return it in words."""
        if len(self.nodes) < 2:
            return "one node"
        gpus = f", GPUs on {_shown(self.gpus)}" if self.gpus else ""
        return f"nodes {_shown(self.nodes)}; this process on {_shown(self.own)}{gpus}"

    def fault(self) -> str | None:
        """Return why steps may be slower than they could be, None if no reason is known."""
        if len(self.own) > 1:
            return (
                f"this process may run on nodes {_shown(self.own)} of the host's memory, and its "
                f"threads are slow on states that lie on another: {_REMEDY}"
            )
        if len(self.nodes) > 1 and self.own and not {None, *self.own} & set(self.gpus or [None]):
            return (
                f"this process runs on node {_shown(self.own)} of the host's memory, expected "
                f"{_shown(self.gpus)} of its GPU, as copies to others are slow: {_REMEDY}"
            )
        return None


def _node_of_gpu(folder: Path) -> int | None:
    """Return the node of a PCI device; sysfs has -1 where the firmware does not say it."""
    path = folder / "numa_node"
    node = int(path.read_text()) if path.is_file() else -1
    return node if node >= 0 else None


def _numbers(path: Path) -> set[int]:
    """Return the numbers of a list such as "0-3,8-11", none without the file."""
    ranges = path.read_text().split(",") if path.is_file() else []
    ends = [part.strip().split("-") for part in ranges if part.strip()]
    return {number for end in ends for number in range(int(end[0]), int(end[-1]) + 1)}


def _shown(nodes: Iterable[int | None]) -> str:
    return ", ".join("an unknown one" if node is None else str(node) for node in nodes)


def advise(begin: int, num_bytes: int, advice: int) -> None:
    """Give advice, a constant MADV_* of `mmap`, on the pages at an address."""
    begin, end = begin // mmap.PAGESIZE * mmap.PAGESIZE, begin + num_bytes
    if begin < end:
        _madvise()(begin, end - begin, advice)


@cache
def _madvise() -> Callable[[int, int, int], int]:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise


def rounding_bytes(sizes_bytes: Iterable[int], max_round_mib: int | None) -> int:
    """Return what torch's allocator adds to page-locked tensors of these sizes.

    It rounds each up to a power of two of bytes, unless it has more than
    `pinned_max_round_threshold_mb` of PYTORCH_ALLOC_CONF (torch 2.13,
    ATen/core/CachingHostAllocator.h).
    """
    limit = None if max_round_mib is None else max_round_mib * 2**20
    return sum(
        count * ((1 << (size - 1).bit_length()) - size)
        for size, count in Counter(sizes_bytes).items()
        if size and (limit is None or size <= limit)
    )


def max_round_mib(environment: Mapping[str, str]) -> int | None:
    """Return the threshold that torch would read from an environment, None if there is none."""
    text = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
    found = re.search(r"\bpinned_max_round_threshold_mb:(\d+)", text)
    return int(found[1]) if found else None
