# SPDX-License-Identifier: Apache-2.0
"""Joins the fragments of a parameter into its whole state, in 8 bits or decoded.

Codes and scales are joined block by block: `zero8.checkpoint.read.joined_blocks`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zero8.checkpoint.read.fragment import Fragment
from zero8.checkpoint.read.joined_blocks import Blocks
from zero8.spec.algorithm import Algorithm
from zero8.spec.corrections import wide_weights
from zero8.state.extent import Extent
from zero8.state.plain import PlainState
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable
from zero8.state.target import Target

Empty = Callable[[tuple[int, ...], torch.dtype], Tensor]
"""Returns an uninitialized tensor of a shape."""


def in_memory(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized tensor."""
    return torch.empty(shape, dtype=dtype, device="cpu")


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
        target = Target(self.algorithm, self.stores[0].codec, self.piece, extent)
        plain = PlainState(target.entries_of(self.stores, numbers), extent)
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


def joined(
    fragments: list[Fragment],
    empty: Empty = in_memory,
    *,
    decoded: bool = False,
    with_weights: bool = True,
) -> Parameter:
    """Return a parameter, copied from all of its fragments.

    Args:
        fragments: at least one.
        empty: allocates its tensors.
        decoded: whether the moments are to be float32, each as its fragment decodes it.
        with_weights: whether to read the weights, which may be twice as large as the states.

    Raises:
        ValueError: naming file and parameter, if an element is missing or there twice, fragments
            are of different steps or do not match, or their values are damaged.
    """
    first = fragments[0]
    for fragment in fragments:
        _check_is_alike(fragment, first)
    _check_cover(fragments)
    whole = Extent.whole(first.piece.shape)
    block_size = 0 if decoded else first.piece.block_size
    piece = replace(first.piece, first=0, numel=whole.numel, block_size=block_size)
    table = whole.table(piece)
    stores = tuple(_room(store, table, empty) for store in first.stores)
    blocks = [Blocks(store) for store in stores] if piece.is_quantized else []
    for fragment in fragments:
        for at, store in enumerate(fragment.stores if fragment.piece.numel else ()):
            if blocks:
                blocks[at].take(store)
            else:
                stores[at].dense[_place(fragment)] = store.read(0, fragment.piece.numel)
    cut = set[int]().union(*(one.finish() for one in blocks))
    return Parameter(
        piece,
        first.step,
        {name: max(fragment.memory[name] for fragment in fragments) for name in first.memory},
        first.is_of_fp32,
        first.algorithm,
        stores,
        _values(fragments, [one.weights if with_weights else None for one in fragments], empty),
        _values(fragments, [fragment.correction for fragment in fragments], empty),
        len(cut) + first.blocks_joined,
    )


def _place(fragment: Fragment) -> slice:
    return slice(fragment.piece.first, fragment.piece.first + fragment.piece.numel)


def _values(fragments: list[Fragment], parts: list[Tensor | None], empty: Empty) -> Tensor | None:
    """Return values that fragments have one of per element, None if one of them has none."""
    there = [part for part in parts if part is not None]
    if len(there) < len(parts):
        return None
    shape = fragments[0].piece.shape
    whole = empty((math.prod(shape),), there[0].dtype)
    for fragment, part in zip(fragments, there, strict=True):
        whole[_place(fragment)] = part
    return whole.view(shape)


def _check_is_alike(fragment: Fragment, first: Fragment) -> None:
    ours, theirs = _facts(first), _facts(fragment)
    for what, expected in ours.items():
        if theirs[what] != expected:
            raise ValueError(
                f"{fragment.file}: {fragment.name}: got {what} {theirs[what]}, {first.file.name} "
                f"has {expected}; are the files of one checkpoint?"
            )
    try:
        for store in fragment.stores:
            store.check_values()
    except ValueError as error:
        raise ValueError(f"{fragment.file}: {fragment.name}: {error}") from error


def _facts(fragment: Fragment) -> dict:
    """Return what all fragments of a parameter must share, keyed by a description for messages."""
    piece, store = fragment.piece, fragment.stores[0]
    return {
        "shape and block size": (piece.shape, piece.block_size),
        "codec": store.codec.name if piece.is_quantized and store.codec else None,
        "identity": piece.identity,
        "algorithm": fragment.algorithm.name,
        "moments of an fp32 optimizer": fragment.is_of_fp32,
        "corrections of weights": fragment.correction is not None,
    }


def _check_cover(fragments: list[Fragment]) -> None:
    """Raise ValueError unless fragments have every element of a parameter once, at one step."""
    name, problems = "/".join(filter(None, fragments[0].key)), []
    steps = {fragment.step: fragment.file for fragment in fragments}
    if len(steps) > 1:
        places = ", ".join(f"{step} in {file.name}" for step, file in sorted(steps.items()))
        problems.append(f"its parts have taken different numbers of steps: {places}")
    runs = [(one.piece.first, one.piece.numel, one.file) for one in fragments]
    numel, end = math.prod(fragments[0].piece.shape), 0
    for first, length, file in [*sorted(runs), (numel, 1, None)]:
        if length and first != end:
            what = "are in no file" if first > end else f"are in {file.name} again"
            begin, stop = sorted((first, end))
            problems.append(f"elements {begin} to {stop - 1} {what}")
        end = max(end, first + length)
    if problems:
        raise ValueError(f"{fragments[0].file.parent}: {name}: {'; '.join(problems)}")


def _room(like: MomentStore, table: PieceTable, empty: Empty) -> MomentStore:
    (piece,) = table.pieces
    if not piece.is_quantized:
        dense = empty((piece.numel,), torch.float32)
        return MomentStore(None, like.rule, table, dense[:0].byte(), dense[:0], dense)
    codes = empty((piece.num_bytes(like.code.bits),), torch.uint8)
    if like.code.bits < 8:
        codes.zero_()
    scales = empty((table.num_blocks, *like.code.scale_shape), torch.float32)
    return MomentStore(like.codec, like.rule, table, codes, scales, scales.flatten()[:0])
