# SPDX-License-Identifier: Apache-2.0
"""The nodes of a host's memory (NUMA), as Linux's sysfs has them.

A page is on the node of the thread that touches it first.  States, those that are loaded too, are
written first in the shares of a step's threads.  What DeepSpeed and torch make is where the thread
that made it ran: everything is near only to ranks whose threads are all on one node.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

SYSFS = Path("/sys")
_REMEDY = (
    "bind each rank to the node of its GPU (torchrun --numa-binding node, deepspeed "
    "--bind_cores_to_rank, numactl --cpunodebind); zero8 doctor, launched as the training is, "
    "checks each rank"
)


class Placement(NamedTuple):
    """Where a process and its GPUs are.

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
