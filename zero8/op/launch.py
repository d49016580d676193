# SPDX-License-Identifier: Apache-2.0
"""The arguments of a launch of the CUDA kernel: one table in memory, and the launch's shape.

The table holds everything that changes from step to step.  So a CUDA graph, which reads it from a
fixed address, takes another step when the table is overwritten.
"""

from dataclasses import dataclass

import numpy as np

from zero8.algorithms.adam import ADAM
from zero8.algorithms.table import ALGORITHMS, algorithm_called
from zero8.op import kernel
from zero8.op.codec_maps import WITH_MAPS
from zero8.op.structs import FLOAT32_MOMENTS
from zero8.spec.algorithm import Algorithm
from zero8.spec.codec import SHARED
from zero8.spec.tiles import ROWS_PER_BAND

# csrc/cuda/team.h
PER_THREAD = 8
WARP = 32
# Smaller thread blocks fit a multiprocessor's registers better; only large blocks need more.
MIN_THREADS = 128

_SMALLEST_NORMAL = np.float32(2.0**-126)


def kernel_of(algorithm: Algorithm) -> str:
    """Return the name of the kernel of an algorithm."""
    return f"zero8_step_{algorithm.kernel.name}"


KERNEL_OF_TILES = f"{kernel_of(ADAM)}_{SHARED.name}"
"""That of `SHARED`, which steps float32 moments too."""
KERNELS = (*dict.fromkeys(map(kernel_of, ALGORITHMS)), KERNEL_OF_TILES)


@dataclass(frozen=True)
class Launch:
    """The arguments of a kernel, without the maps of codecs and the counters.

    Attributes:
        kernel: the kernel's name.
        table: (bytes,) uint8: the segments, their first tasks, and the scalars.
        first_tasks_at: byte offset in the table of the running sums of numbers of tasks.
        scalars_at: byte offset in the table of the scalars.
        num_segments: number of segments, and of counters.
        num_tasks: number of blocks of all segments, or of tiles, which are a task each.
        team_threads: threads that share a task.
        teams: tasks that a thread block works on at once.
        uses_maps: whether any segment has a codec with maps.
    """

    kernel: str
    table: np.ndarray
    first_tasks_at: int
    scalars_at: int
    num_segments: int
    num_tasks: int
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
        codecs = records["moments"]["codec"][:, 0]
        is_in_tiles = codecs == SHARED.number
        others_are_served = np.isin(codecs, (SHARED.number, FLOAT32_MOMENTS)).all()
        assert not is_in_tiles.any() or others_are_served, "their kernel has no other codecs"
        num_tasks = np.where(is_in_tiles, _num_tiles(records), _num_blocks(records))
        first_tasks = np.zeros(len(records) + 1, np.int64)
        np.cumsum(num_tasks, out=first_tasks[1:])
        parts = [part.view(np.uint8) for part in (records, first_tasks, _flushed(scalars))]
        # Items are multiples of 8 bytes, so everything is aligned.
        assert all(part.nbytes % 8 == 0 for part in parts[:2])
        block_size = int(records["block_size"].max(initial=PER_THREAD * WARP))
        team_threads = block_size // PER_THREAD
        return cls(
            kernel=KERNEL_OF_TILES if is_in_tiles.any() else kernel_of(algorithm),
            table=np.concatenate(parts),
            first_tasks_at=parts[0].nbytes,
            scalars_at=parts[0].nbytes + parts[1].nbytes,
            num_segments=len(records),
            num_tasks=int(first_tasks[-1]),
            team_threads=team_threads,
            teams=max(1, MIN_THREADS // team_threads),
            uses_maps=bool(np.isin(records["moments"]["codec"], WITH_MAPS).any()),
        )

    def grid(self, resident: int) -> int:
        """Return how many thread blocks to launch where `resident` of them run at a time."""
        return max(1, min(resident, -(-self.num_tasks // self.teams)))


def _num_blocks(records: np.ndarray) -> np.ndarray:
    """Return the number of blocks that each segment touches, as `BlockGrid.num_blocks_touched`."""
    begin, end = _blocks(records)
    count: np.ndarray = end - begin
    return count


def _num_tiles(records: np.ndarray) -> np.ndarray:
    """Return the number of tiles that each segment touches, as `Tiles.num_tiles`."""
    row, size = records["row_length"], records["block_size"]
    begin, end = _blocks(records)
    num_blocks = end - begin
    # Blocks that a boundary cuts are tiles of their own; both may cut the same one.
    begin = begin + (records["first"] % row % size != 0)
    end = end - ((records["first"] + records["numel"]) % row % size != 0)
    num_whole = np.maximum(end - begin, 0)
    # The whole blocks of a band are in as many tiles as they are, up to those of a row.
    per_row = -(-row // size)
    per_band = ROWS_PER_BAND * per_row
    in_first_band = np.minimum(num_whole, (begin // per_band + 1) * per_band - begin)
    bands, in_last_band = np.divmod(num_whole - in_first_band, per_band)
    of_bands = np.minimum([in_first_band, in_last_band], per_row).sum(0) + bands * per_row
    count: np.ndarray = num_blocks - num_whole + of_bands
    return count


def _blocks(records: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first block that each segment touches, and the one behind the last."""
    row, size, first = records["row_length"], records["block_size"], records["first"]
    last = first + np.maximum(records["numel"], 1) - 1

    def block_of(element: np.ndarray) -> np.ndarray:
        block: np.ndarray = element // row * -(-row // size) + element % row // size
        return block

    begin = block_of(first)
    return begin, np.where(records["numel"] == 0, begin, block_of(last) + 1)


def _flushed(scalars: np.ndarray) -> np.ndarray:
    """Return scalars with subnormal numbers replaced by zeros, as CPU kernels read them."""
    numbers = scalars.view(np.float32)
    tiny = np.abs(numbers) < _SMALLEST_NORMAL
    return np.where(tiny, np.copysign(np.float32(0), numbers), numbers)
