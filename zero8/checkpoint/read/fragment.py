# SPDX-License-Identifier: Apache-2.0
"""A fragment: a run of elements of a parameter with their state.

All readers give fragments, one for what a file holds of a parameter; `zero8.checkpoint.read.joined`
makes one of the whole parameter from them, which all writers take.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from zero8.spec.algorithm import Algorithm
from zero8.spec.algorithms import algorithm_called, algorithm_of_fp32
from zero8.spec.buffers import check_entry
from zero8.spec.codec import CODECS, DEFAULT_CODEC
from zero8.spec.corrections import wide_weights
from zero8.spec.dither import identity_of
from zero8.state.entries import is_of_fp32
from zero8.state.extent import Extent
from zero8.state.header import StateHeader
from zero8.state.memory import checked_memory
from zero8.state.plain import checked_step, saved_form, stores_of
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable
from zero8.state.target import Target


@dataclass(frozen=True)
class Fragment:
    """A run of elements of a parameter with their moments.

    Attributes:
        name: the parameter's name, after its part of a model-parallel model and a slash, if any.
        file: its file.
        step: steps taken.
        memory: the algorithm's memory (`zero8.state.memory`), by name.
        stores: the moments, over a segment table of this run alone.
        weights: (numel,) master weights, None if they are stored elsewhere.
        correction: (numel,) int8, the corrections of bfloat16 weights, if any.
        is_of_fp32: whether it is of an fp32 optimizer, without blocks and codes.
    """

    name: str
    file: Path
    step: int
    memory: dict[str, float]
    stores: tuple[MomentStore, ...]
    weights: Tensor | None = None
    correction: Tensor | None = None
    is_of_fp32: bool = False

    @property
    def piece(self) -> Piece:
        """The run of elements."""
        (piece,) = self.stores[0].table.pieces
        return piece

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the moments."""
        return algorithm_called(self.stores[0].rule.algorithm)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.piece.shape

    def of(self, algorithm: Algorithm) -> "Fragment":
        """Return the same with moments of another algorithm, which have the same names."""
        pairs = zip(self.stores, algorithm.moments, strict=True)
        return replace(self, stores=tuple(replace(store, rule=rule) for store, rule in pairs))

    def entries(self) -> dict:
        """Return the whole state's entries for our optimizer, or for the fp32 one that it is of."""
        if self.is_of_fp32:
            return self.in_float32()
        extent = Extent.whole(self.shape)
        numbers = {"step": self.step, **self.memory}
        target = Target(self.algorithm, self.stores[0].codec, self.piece, extent)
        saved = saved_form(target.entries_of(self.stores, numbers), extent)
        if self.correction is None:
            return saved
        return saved | {"param_correction": self.correction.view(self.shape)}

    def in_float32(self) -> dict:
        """Return the whole state's entries for the fp32 optimizer, of moments that are decoded."""
        moments = {store.name: store.dense.view(self.shape) for store in self.stores}
        return {"step": torch.tensor(float(self.step)), **moments}

    def corrected_weights(self) -> Tensor | None:
        """Return the whole weights; with corrections, as float32 of 24 significant bits."""
        if self.weights is None:
            return None
        if self.correction is None:
            return self.weights.view(self.shape)
        return wide_weights(self.weights, self.correction).view(self.shape)


def of_piece(store: MomentStore, number: int) -> MomentStore:
    """Return the part of a store that belongs to one piece, as views."""
    piece, moment = store.table.pieces[number], store.piece(number)
    table = PieceTable((replace(piece, start=0),), piece.numel)
    if piece.is_quantized:
        buffers = moment.values, moment.scales, store.dense[:0]
    else:
        buffers = store.codes[:0], store.scales[:0], moment.values
    return MomentStore(store.codec, store.rule, table, *buffers)


def fragment_of(file: Path, name: str, entries: dict, weights: Tensor | None) -> Fragment:
    """Return the fragment of a whole state, of `zero8.state.plain` or of an fp32 optimizer.

    Raises ValueError, naming the file, if the entries are inconsistent.
    """
    try:
        of_fp32 = is_of_fp32(entries)
        if of_fp32:
            algorithm = algorithm_of_fp32(entries)
            extent = Extent.whole(tuple(entries[algorithm.moment_names[0]].shape))
            piece = Piece(0, extent.numel, 0, extent.shape, identity_of(name), 0, name)
            codec = CODECS[DEFAULT_CODEC]  # which encodes nothing in a piece without blocks
            entries = Target(algorithm, codec, piece, extent).from_fp32(entries)
        else:
            extent = Extent.whole(StateHeader.of(entries, name).shape)
        stores = stores_of(entries, extent, name)
        memory = checked_memory(StateHeader.of(entries, name).algorithm, entries)
        step = checked_step(entries)
        correction = entries.get("param_correction")
        if correction is not None:
            correction = check_entry("param_correction", correction, extent.numel, [torch.int8])
            correction = correction.reshape(-1)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file}: {error}") from error
    if weights is not None:
        weights = weights.reshape(-1) if weights.numel() == extent.numel else None
    return Fragment(name, file, step, memory, tuple(stores), weights, correction, of_fp32)
