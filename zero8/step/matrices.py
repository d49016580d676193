# SPDX-License-Identifier: Apache-2.0
"""The matrices of a step on this rank: which of their elements it has, and where."""

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from zero8.algorithms.muon import matrices_of, multiplications, ranges_by_matrix
from zero8.ranks.owners import Held
from zero8.state.table import Piece

Places = list[int]
"""Numbers of records of a part."""


class Run(NamedTuple):
    """Consecutive elements of a matrix on this rank.

    Attributes:
        start: the index of the first in the unit.
        first: its index in the matrix.
        numel: the number of elements.
    """

    start: int
    first: int
    numel: int


@dataclass(frozen=True)
class Unit:
    """The elements of one parameter on this rank, piece after piece.

    Attributes:
        pieces: the pieces; at least one, in the order of their elements.
        places: their records.
        owner: the index in the batch of the parameter that has them.
    """

    pieces: list[Piece]
    places: Places
    owner: int

    @property
    def identity(self) -> int:
        """The parameter's identity."""
        return self.pieces[0].identity

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's shape."""
        return self.pieces[0].shape

    @property
    def numel(self) -> int:
        """The number of elements on this rank."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The rows and columns of a matrix."""
        _, rows, columns = matrices_of(self.shape)
        return rows, columns

    @cached_property
    def runs(self) -> dict[int, list[Run]]:
        """What this rank has of each matrix, by the number of the matrix in the parameter."""
        runs: dict[int, list[Run]] = defaultdict(list)
        start = 0
        for piece in self.pieces:
            for number, first, numel in ranges_by_matrix(self.shape, piece.first, piece.numel):
                runs[number].append(Run(start, first, numel))
                start += numel
        return dict(runs)

    @cached_property
    def cut(self) -> set[int]:
        """The numbers of the matrices that other ranks have elements of, too."""
        size = math.prod(self.matrix_shape)
        return {one for one, runs in self.runs.items() if sum(run.numel for run in runs) < size}

    @cached_property
    def whole(self) -> list[int]:
        """The numbers of the other matrices."""
        return [one for one in self.runs if one not in self.cut]

    def held(self, number: int, like: int) -> Held:
        """Return what other ranks need to know of a matrix; for `like` see `Held`."""
        ranges = tuple((run.first, run.numel) for run in self.runs[number])
        return Held(self.matrix_shape, like, float(multiplications(self.matrix_shape)), ranges)
