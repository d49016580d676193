# SPDX-License-Identifier: Apache-2.0
"""Which parameters get 8-bit moments: decided by name, global shape and configuration only.

The shard is never looked at, so ranks, restarts and other world sizes always agree.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zero8.spec.grid import MIN_ROW_LENGTH, BlockGrid, check_block_size


@dataclass(frozen=True)
class Decision:
    """A parameter's block grid, None if its moments stay float32, and the reason in words."""

    grid: BlockGrid | None
    reason: str


@dataclass(frozen=True)
class Policy:
    """The rule that decides between 8-bit and float32 moments.

    Attributes:
        block_size: elements per block, a power of two in 64..4096.
        min_8bit_size: parameters with fewer elements stay float32.
        fp32_params: glob patterns of names that stay float32.

    Raises:
        ValueError: on construction, if a value is out of range.
    """

    block_size: int = 256
    min_8bit_size: int = 4096
    fp32_params: tuple[str, ...] = ()

    def __post_init__(self):
        """Check the values."""
        check_block_size(self.block_size)
        size = self.min_8bit_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 0:
            raise ValueError(f"min_8bit_size: got {size!r}, expected an integer >= 0")
        patterns = self.fp32_params
        if not isinstance(patterns, Sequence) or isinstance(patterns, str):
            raise ValueError(
                f"fp32_params: got {patterns!r}, expected a list of glob patterns such as "
                "['*embed*', 'lm_head.weight']"
            )
        if bad := [pattern for pattern in patterns if not isinstance(pattern, str)]:
            raise ValueError(f"fp32_params: got {bad[0]!r} in the list, expected strings")
        object.__setattr__(self, "fp32_params", tuple(patterns))

    def decide(self, name: str | None, shape: tuple[int, ...]) -> Decision:
        """Return the decision for a parameter of global `shape`.

        Raises:
            ValueError: if there are patterns but the parameter has no name.
        """
        if self.fp32_params and name is None:
            raise ValueError(
                "fp32_params: got patterns, but the parameters have no names; pass "
                "model.named_parameters() instead of model.parameters()"
            )
        for pattern in self.fp32_params:
            if fnmatchcase(name, pattern):
                return Decision(None, f"matches fp32_params pattern {pattern!r}")
        numel = math.prod(shape)
        if len(shape) < 2:
            return Decision(None, f"{len(shape)}-dimensional")
        if numel < self.min_8bit_size:
            return Decision(None, f"{numel} elements, fewer than min_8bit_size")
        grid = BlockGrid.of(shape, self.block_size)
        if grid is None:
            return Decision(
                None, f"a row has {math.prod(shape[1:])} elements, fewer than {MIN_ROW_LENGTH}"
            )
        return Decision(grid, f"{grid.num_rows} rows x {grid.blocks_per_row} blocks")
