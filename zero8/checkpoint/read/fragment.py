# SPDX-License-Identifier: Apache-2.0
"""A fragment: the part of a parameter's state in one file of a checkpoint."""

from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from zero8.spec.algorithm import Algorithm
from zero8.spec.algorithms import algorithm_called
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable


@dataclass(frozen=True)
class Fragment:
    """A run of elements of a parameter with their moments.

    Attributes:
        part: the model-parallel part, whose parameters share their names with other parts'; ""
            without model parallelism.
        name: the parameter's name.
        file: its file.
        step: steps taken.
        memory: the algorithm's memory (`zero8.state.memory`), by name.
        stores: the moments, over a segment table of this run alone.
        weights: (numel,) master weights, None if they are stored elsewhere.
        correction: (numel,) int8, the corrections of bfloat16 weights, if any.
        is_of_fp32: whether it is of an fp32 optimizer, without blocks and codes.
        blocks_joined: number of blocks that its reader has encoded anew, as ranks had cut them.
    """

    part: str
    name: str
    file: Path
    step: int
    memory: dict[str, float]
    stores: tuple[MomentStore, ...]
    weights: Tensor | None = None
    correction: Tensor | None = None
    is_of_fp32: bool = False
    blocks_joined: int = 0

    @property
    def key(self) -> tuple[str, str]:
        """The parameter's part and name."""
        return self.part, self.name

    @property
    def piece(self) -> Piece:
        """The run of elements."""
        (piece,) = self.stores[0].table.pieces
        return piece

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the moments."""
        return algorithm_called(self.stores[0].rule.algorithm)


def of_piece(store: MomentStore, number: int) -> MomentStore:
    """Return the part of a store that belongs to one piece, as views."""
    piece, moment = store.table.pieces[number], store.piece(number)
    table = PieceTable((replace(piece, start=0),), piece.numel)
    if piece.is_quantized:
        buffers = moment.values, moment.scales, store.dense[:0]
    else:
        buffers = store.codes[:0], store.scales[:0], moment.values
    return MomentStore(store.codec, store.rule, table, *buffers)
