# SPDX-License-Identifier: Apache-2.0
"""Joins the fragments of a parameter into its whole state, in 8 bits or decoded.

Codes and scales are joined block by block: `zero8.checkpoint.read.joined_blocks`.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zero8.checkpoint.files.staging import Staging
from zero8.checkpoint.read.fragment import Fragment
from zero8.checkpoint.read.joined_blocks import Blocks
from zero8.spec.algorithm import Algorithm
from zero8.spec.corrections import wide_weights
from zero8.state.extent import Extent
from zero8.state.plain import PlainState
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable


@dataclass(frozen=True)
class Parameter:
    """A whole parameter with its moments.

    Attributes:
        piece: the whole parameter as a piece.
        step: steps taken.
        memory: the algorithm's memory, by name.
        is_of_fp32: whether the moments are of an fp32 optimizer, and were never encoded.
        algorithm: the algorithm of the moments.
        stores: the moments.
        weights: shaped as the parameter, None if unknown.
        correction: int8, shaped as the parameter: the corrections of bfloat16 weights, if any.
        blocks_joined: number of blocks re-encoded.
    """

    piece: Piece
    step: int
    memory: dict[str, float]
    is_of_fp32: bool
    algorithm: Algorithm
    stores: tuple[MomentStore, ...]
    weights: Tensor | None
    correction: Tensor | None
    blocks_joined: int

    def of(self, algorithm: Algorithm) -> "Parameter":
        """Return the same with moments of another algorithm, which have the same names."""
        pairs = zip(self.stores, algorithm.moments, strict=True)
        stores = tuple(replace(store, rule=rule) for store, rule in pairs)
        return replace(self, algorithm=algorithm, stores=stores)

    def entries(self) -> dict:
        """Return the state's entries in a state dict of our optimizer, or of the fp32 one."""
        if self.is_of_fp32:
            return self.in_float32()
        extent = Extent.whole(self.piece.shape)
        numbers = {"step": self.step, **self.memory}
        plain = PlainState.of(self.algorithm, list(self.stores), self.piece, extent, numbers)
        correction = {} if self.correction is None else {"param_correction": self.correction}
        return plain.saved() | correction

    def in_float32(self) -> dict:
        """Return the state's entries for the fp32 optimizer, of moments that are decoded."""
        moments = {store.name: store.dense.view(self.piece.shape) for store in self.stores}
        return {"step": torch.tensor(float(self.step)), **moments}

    def corrected_weights(self) -> Tensor | None:
        """Return the weights; with corrections, as float32 of 24 significant bits."""
        if self.weights is None or self.correction is None:
            return self.weights
        return wide_weights(self.weights, self.correction)


class Assembly:
    """Joins the fragments of a parameter one by one."""

    def __init__(self, first: Fragment, staging: Staging, decoded: bool):
        """Allocate the parameter's tensors.

        Args:
            first: one of its fragments; it is not added.
            staging: allocates the tensors.
            decoded: whether the moments are to be float32, each as its fragment decodes it.
        """
        of_all = first.pieces[0]
        whole = Extent.whole(of_all.shape)
        block_size = 0 if decoded else of_all.block_size
        self._piece = replace(of_all, start=0, first=0, numel=whole.numel, block_size=block_size)
        self._like, self._staging = first, staging
        self._table = whole.table(self._piece)
        self._stores = tuple(_room(store, self._table, staging) for store in first.stores)
        self._weights = self._room_for(first.weights)
        self._correction = self._room_for(first.correction)
        self._memory: dict[str, float] = {}
        self._joiners = [Blocks(s) for s in self._stores] if self._piece.is_quantized else []

    def add(self, fragment: Fragment) -> None:
        """Copy a fragment.

        Raises:
            ValueError: if it is damaged, or does not match the first.
        """
        self._check_is_alike(fragment)
        for name, value in fragment.memory.items():
            self._memory[name] = max(value, self._memory.get(name, 0.0))
        if fragment.weights is None:
            self._weights = None
        for number, piece in enumerate(fragment.pieces):
            there = slice(piece.first, piece.first + piece.numel)
            here = slice(piece.start, piece.start + piece.numel)
            if self._weights is not None:
                self._weights[there] = fragment.weights[here]
            if self._correction is not None:
                self._correction[there] = fragment.correction[here]
            if piece.numel and self._piece.is_quantized:
                for joiner, theirs in zip(self._joiners, fragment.stores, strict=True):
                    joiner.take(theirs, number)
            elif piece.numel:
                for ours, theirs in zip(self._stores, fragment.stores, strict=True):
                    ours.dense[there] = theirs.read(piece.start, piece.numel)

    def finished(self) -> Parameter:
        """Return the parameter; `Coverage` has checked that each element was added once."""
        shape, joined = self._piece.shape, set[int]()
        for joiner in self._joiners:
            joined |= joiner.finish()
        return Parameter(
            self._piece,
            self._like.step,
            self._memory,
            self._like.is_of_fp32,
            self._like.algorithm,
            self._stores,
            *(None if t is None else t.view(shape) for t in (self._weights, self._correction)),
            len(joined) + self._like.blocks_joined,
        )

    def _room_for(self, values: Tensor | None) -> Tensor | None:
        if values is None:
            return None
        return self._staging.empty((self._piece.numel,), values.dtype)

    def _check_is_alike(self, fragment: Fragment) -> None:
        ours, theirs = _facts(self._like), _facts(fragment)
        for what, expected in ours.items():
            if theirs[what] != expected:
                raise ValueError(
                    f"{fragment.name}: got {what} {theirs[what]} in {fragment.file}, expected "
                    f"{expected}, as in {self._like.file}; are the files of one checkpoint?"
                )
        for store in fragment.stores:
            try:
                store.check_values()
            except ValueError as error:
                raise ValueError(f"{fragment.file}: {error}") from error
        correction = fragment.correction
        numel = fragment.stores[0].table.numel
        if correction is not None and (
            correction.dtype != torch.int8 or correction.numel() != numel
        ):
            raise ValueError(
                f"{fragment.file}: param_correction of {fragment.name}: got "
                f"{correction.numel()} elements of {correction.dtype}, expected {numel} of int8"
            )


def _facts(fragment: Fragment) -> dict:
    """Return what all fragments of a parameter must share, keyed by a description for messages."""
    piece, store = fragment.pieces[0], fragment.stores[0]
    return {
        "codec": store.codec.name if piece.is_quantized else None,
        "identity": piece.identity,
        "algorithm": fragment.algorithm.name,
        "moments of an fp32 optimizer": fragment.is_of_fp32,
        "corrections of weights": fragment.correction is not None,
    }


def _room(like: MomentStore, table: PieceTable, staging: Staging) -> MomentStore:
    (piece,) = table.pieces
    if not piece.is_quantized:
        dense = staging.empty((piece.numel,), torch.float32)
        return MomentStore(like.codec, like.rule, table, dense[:0].byte(), dense[:0], dense)
    codes = staging.empty((piece.num_bytes(like.code.bits),), torch.uint8)
    if like.code.bits < 8:
        codes.zero_()
    scales = staging.empty((table.num_blocks, *like.code.scale_shape), torch.float32)
    return MomentStore(like.codec, like.rule, table, codes, scales, scales.flatten()[:0])
