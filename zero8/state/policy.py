# SPDX-License-Identifier: Apache-2.0
"""Which parameters get 8-bit moments: decided by name, module, global shape and configuration only.

The shard is never looked at, so ranks, restarts and other world sizes always agree.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache

from zero8.spec.grid import BlockGrid, check_block_size, is_narrow, rows_per_block

WRAPPER_PARTS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""Parts of parameter names that FSDP1, activation checkpointing and torch.compile insert."""
WRAPPER_PREFIXES = ("module.", "base_model.model.")
"""Prefixes of parameter names that DistributedDataParallel and PEFT add."""


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

    def __post_init__(self) -> None:
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

    def decide(self, name: str | None, shape: tuple[int, ...], why_float32: str = "") -> Decision:
        """Return the decision for a parameter; see `ParamInfo`.

        Raises ValueError if there are patterns but the parameter has no name.
        """
        for pattern in self.fp32_params:
            if name is None:
                raise ValueError(
                    "fp32_params: got patterns, but the parameters have no names; pass "
                    "model.named_parameters() instead of model.parameters()"
                )
            if _matches(name, pattern):
                return Decision(None, f"matches fp32_params pattern {pattern!r}")
        if len(shape) < 2:
            return Decision(None, f"{len(shape)}-dimensional")
        if why_float32:
            return Decision(None, why_float32)
        if math.prod(shape) < self.min_8bit_size:
            return Decision(None, "fewer elements than min_8bit_size")
        grid = BlockGrid.of(shape, self.block_size)
        if grid is None:
            return Decision(None, "rows without elements")
        if is_narrow(shape):
            rows = rows_per_block(shape, self.block_size)
            return Decision(grid, f"{grid.num_blocks} blocks of {rows} rows")
        return Decision(grid, f"{grid.num_rows} rows x {grid.blocks_per_row} blocks")

    def patterns_without(self, names: Iterable[str]) -> list[str]:
        """Return the patterns of `fp32_params` that match none of these names."""
        names = list(names)
        return [p for p in self.fp32_params if not any(_matches(name, p) for name in names)]

    def nearest(self, pattern: str, names: Iterable[str]) -> list[str]:
        """Return up to three names that resemble a pattern without matches."""
        meant: dict[str, str] = {}
        for name in names:
            for text in (*name.split("."), name):
                meant.setdefault(text, name)
        texts = get_close_matches(pattern.strip("*?."), list(meant), cutoff=0.5)
        return list(dict.fromkeys(meant[text] for text in texts))

    def float32_shares(
        self, params: Iterable[tuple[str | None, tuple[int, ...], str]]
    ) -> dict[str, float]:
        """Return the shares of all elements that keep float32 moments, by reason, largest first.

        `params` are the arguments of `decide` for each parameter.
        """
        numel_of: Counter[str] = Counter()
        for name, shape, why_float32 in params:
            decision = self.decide(name, shape, why_float32)
            numel_of["" if decision.grid else decision.reason] += math.prod(shape)
        kept = [(reason, numel) for reason, numel in numel_of.most_common() if reason and numel]
        return {reason: numel / numel_of.total() for reason, numel in kept}


def _matches(name: str, pattern: str) -> bool:
    """Return whether a pattern matches a name, also without the parts that wrappers have added."""
    return any(fnmatchcase(n, p) for n in {name, _bare(name)} for p in {pattern, _bare(pattern)})


@lru_cache(maxsize=65536)
def _bare(name: str) -> str:
    for part in WRAPPER_PARTS:
        name = name.replace(part, "")
    for prefix in WRAPPER_PREFIXES:
        name = name.removeprefix(prefix)
    return name
