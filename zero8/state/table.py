# SPDX-License-Identifier: Apache-2.0
"""The segment table of a shard: which ranges of which parameters it holds.

A shard is a flat run of elements that one rank holds; a piece is the part of it that belongs to
one parameter.  Elements outside every piece are padding and have no moments.
"""

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from zero8.spec.grid import MAX_DIMS, MAX_NUMEL, BlockGrid, check_block_size
from zero8.spec.shown import shown


@dataclass(frozen=True)
class Piece:
    """A run of elements of one parameter inside a shard.

    Attributes:
        start: index in the shard of the first element.
        numel: number of elements.
        first: index in the parameter of the first element.
        shape: the parameter's global shape.
        identity: the parameter's 64-bit identity (`zero8.spec.dither.identity_of`).
        block_size: elements per block, 0 where the moments stay float32.
        name: the parameter's name, or its index in constructor order; for messages.

    Raises:
        ValueError: if no parameter of this shape has such a run of elements.
    """

    start: int
    numel: int
    first: int
    shape: tuple[int, ...]
    identity: int
    block_size: int
    name: str

    def __post_init__(self) -> None:
        """Check the values, which may come from files."""
        if not isinstance(self.name, str):
            raise ValueError(f"got a piece called {shown(self.name)}, expected text")
        _check_int(f"{self.name}: identity", self.identity, -(2**63), 2**63 - 1)
        if not isinstance(self.shape, tuple) or len(self.shape) > MAX_DIMS:
            raise ValueError(
                f"{self.name}: got shape {shown(self.shape)}, expected a tuple of at most "
                f"{MAX_DIMS} sizes"
            )
        for size in self.shape:
            _check_int(f"{self.name}: a size of shape", size, 0, MAX_NUMEL)
        whole = math.prod(self.shape)
        _check_int(f"{self.name}: number of elements", whole, 0, MAX_NUMEL)
        _check_int(f"{self.name}: start", self.start, 0, MAX_NUMEL)
        _check_int(f"{self.name}: first", self.first, 0, whole)
        _check_int(f"{self.name}: numel", self.numel, 0, whole - self.first)
        if self.block_size == 0 and type(self.block_size) is int:
            return
        check_block_size(self.block_size)
        if BlockGrid.of(self.shape, self.block_size) is None:
            raise ValueError(
                f"{self.name}: got 8-bit moments of shape {self.shape}, expected 2 or more "
                "dimensions, and rows that are not empty"
            )

    @property
    def is_quantized(self) -> bool:
        """Whether the moments are 8-bit."""
        return self.block_size > 0

    @cached_property
    def grid(self) -> BlockGrid:
        """The parameter's block grid; for float32 moments one row in blocks of 256."""
        if self.is_quantized:
            grid = BlockGrid.of(self.shape, self.block_size)
            assert grid is not None, "checked when the piece was made"
            return grid
        return BlockGrid(1, max(1, math.prod(self.shape)), 256)

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the piece touches."""
        return self.grid.num_blocks_touched(self.first, self.numel)

    def num_bytes(self, bits: int) -> int:
        """Return how many bytes its codes of so many bits take, 0 for float32 moments."""
        return self.grid.num_bytes(self.first, self.numel, bits) if self.is_quantized else 0


@dataclass(frozen=True)
class PieceTable:
    """The pieces of a shard, in order of `start`, and the shard's number of elements.

    Raises:
        ValueError: if pieces overlap, or one reaches beyond the shard.
    """

    pieces: tuple[Piece, ...]
    numel: int

    def __post_init__(self) -> None:
        """Check that pieces are in order, do not overlap, and lie in the shard."""
        _check_int("number of elements of a shard", self.numel, 0, MAX_NUMEL)
        end = 0
        for piece in self.pieces:
            _check_int(f"{piece.name}: start", piece.start, end, self.numel - piece.numel)
            end = piece.start + piece.numel

    @property
    def places(self) -> list[tuple[int, int, int, tuple[int, ...], int]]:
        """All of the pieces except names and identities: buffers and blocks depend on these."""
        return [(q.start, q.numel, q.first, q.shape, q.block_size) for q in self.pieces]

    @cached_property
    def dense_offsets(self) -> tuple[int, ...]:
        """The start of each piece in the float32 buffer, whose last one is its size."""
        return _sums(0 if piece.is_quantized else piece.numel for piece in self.pieces)

    def code_offsets(self, bits: int) -> tuple[int, ...]:
        """Return the start of each piece in a buffer of codes, whose last one is its size."""
        if bits not in self._code_offsets:
            self._code_offsets[bits] = _sums(piece.num_bytes(bits) for piece in self.pieces)
        return self._code_offsets[bits]

    @cached_property
    def _code_offsets(self) -> dict[int, tuple[int, ...]]:
        return {}

    @cached_property
    def scale_offsets(self) -> tuple[int, ...]:
        """The start of each piece in the buffer of scales, whose last one is its size."""
        return _sums(piece.num_blocks if piece.is_quantized else 0 for piece in self.pieces)

    def size(self, *, quantized: bool) -> int:
        """Return the number of elements in pieces with codes (or in float32)."""
        return sum(p.numel for p in self.pieces if p.is_quantized == quantized)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the pieces with codes."""
        return self.scale_offsets[-1]

    def overlapping(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yield (piece number, begin, end) in the shard for pieces that touch the given range."""
        for number, piece in enumerate(self.pieces):
            begin, end = max(start, piece.start), min(start + numel, piece.start + piece.numel)
            if begin < end:
                yield number, begin, end


def _sums(counts: Iterable[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(counts, initial=0))


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name}: got {shown(value)}, expected an integer from {low} to {high}")
