# SPDX-License-Identifier: Apache-2.0
"""The arguments of a launch of the CUDA kernel: one table in memory, and the launch's shape.

The table holds everything that changes from step to step.  So a CUDA graph, which reads it from a
fixed address, takes another step when the table is overwritten.
"""

from dataclasses import dataclass

import numpy as np

from zero8.op import kernel
from zero8.op.codec_maps import WITH_MAPS
from zero8.spec.adam import ADAM
from zero8.spec.algorithm import Algorithm
from zero8.spec.algorithms import algorithm_called

# csrc/cuda/team.h
PER_THREAD = 8
WARP = 32
# Smaller thread blocks fit a multiprocessor's registers better; only large blocks need more.
MIN_THREADS = 128

_SMALLEST_NORMAL = np.float32(2.0**-126)


def kernel_of(algorithm: Algorithm) -> str:
    """Return the name of the kernel of an algorithm."""
    return f"zero8_step_{algorithm.kernel.name}"


@dataclass(frozen=True)
class Launch:
    """The arguments of a kernel, without the maps of codecs and the counters.

    Attributes:
        kernel: the kernel's name.
        table: (bytes,) uint8: the segments, their first blocks, and the scalars.
        first_blocks_at: byte offset in the table of the running sums of numbers of blocks.
        scalars_at: byte offset in the table of the scalars.
        num_segments: number of segments, and of counters.
        num_blocks: number of blocks of all segments.
        team_threads: threads that share a block.
        teams: blocks that a thread block works on at once.
        uses_maps: whether any segment has a codec with maps.
    """

    kernel: str
    table: np.ndarray
    first_blocks_at: int
    scalars_at: int
    num_segments: int
    num_blocks: int
    team_threads: int
    teams: int
    uses_maps: bool

    @classmethod
    def of(cls, records: np.ndarray, scalars: np.ndarray) -> "Launch":
        """Return the launch for packed segments of one algorithm and scalars of `zero8.op.kernel`.

        Raises:
            ValueError: if a field of a segment is invalid; the message names it.
        """
        kernel.check(records, len(scalars))
        assert not records["copy"].any(), "only the CPU's kernel writes copies"
        numbers = np.unique(records["algorithm"]).tolist() or [ADAM.number]
        (algorithm,) = map(algorithm_called, numbers)
        first_blocks = np.zeros(len(records) + 1, np.int64)
        np.cumsum(_num_blocks(records), out=first_blocks[1:])
        parts = [part.view(np.uint8) for part in (records, first_blocks, _flushed(scalars))]
        # Items are multiples of 8 bytes, so everything is aligned.
        assert all(part.nbytes % 8 == 0 for part in parts[:2])
        block_size = int(records["block_size"].max(initial=PER_THREAD * WARP))
        team_threads = block_size // PER_THREAD
        return cls(
            kernel=kernel_of(algorithm),
            table=np.concatenate(parts),
            first_blocks_at=parts[0].nbytes,
            scalars_at=parts[0].nbytes + parts[1].nbytes,
            num_segments=len(records),
            num_blocks=int(first_blocks[-1]),
            team_threads=team_threads,
            teams=max(1, MIN_THREADS // team_threads),
            uses_maps=bool(np.isin(records["moments"]["codec"], WITH_MAPS).any()),
        )

    def grid(self, resident: int) -> int:
        """Return how many thread blocks to launch where `resident` of them run at a time."""
        return max(1, min(resident, -(-self.num_blocks // self.teams)))


def _num_blocks(records: np.ndarray) -> np.ndarray:
    """Return the number of blocks that each segment touches, as `BlockGrid.num_blocks_touched`."""
    row, size = records["row_length"], records["block_size"]
    last = records["first"] + np.maximum(records["numel"], 1) - 1

    def block_of(element: np.ndarray) -> np.ndarray:
        block: np.ndarray = element // row * -(-row // size) + element % row // size
        return block

    return np.where(records["numel"] == 0, 0, block_of(last) - block_of(records["first"]) + 1)


def _flushed(scalars: np.ndarray) -> np.ndarray:
    """Return scalars with subnormal numbers replaced by zeros, as CPU kernels read them."""
    numbers = scalars.view(np.float32)
    tiny = np.abs(numbers) < _SMALLEST_NORMAL
    return np.where(tiny, np.copysign(np.float32(0), numbers), numbers)
