# SPDX-License-Identifier: Apache-2.0
"""Joins the fragments of a parameter into the whole one, in 8 bits or decoded.

A block within one fragment keeps its codes and scales.  A block that a shard boundary cuts has
scales on each side.  It is decoded and encoded as one, to nearest, so that the moment changes by at
most half a code (`zero8.spec.codec`).
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from zero8.checkpoint.read.fragment import Fragment
from zero8.state.extent import Extent
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable

Empty = Callable[..., Tensor]
"""Returns an uninitialized tensor of a shape and a `dtype`, as torch.empty does."""


def joined(
    fragments: list[Fragment],
    empty: Empty = torch.empty,
    *,
    decoded: bool = False,
    with_weights: bool = True,
) -> Fragment:
    """Return a whole parameter, copied from all of its fragments.

    Args:
        fragments: at least one.
        empty: allocates its tensors.
        decoded: whether the moments are to be float32, each as its fragment decodes it.
        with_weights: whether to read the weights, which may be twice as large as the states.

    Raises ValueError, naming file and parameter, if an element is missing or there twice, fragments
    do not match, or their values are damaged.
    """
    first = fragments[0]
    for fragment in fragments:
        _check_is_alike(fragment, first)
    _check_cover(fragments)
    whole = Extent.whole(first.shape)
    block_size = 0 if decoded else first.piece.block_size
    piece = replace(first.piece, first=0, numel=whole.numel, block_size=block_size)
    stores = tuple(_room(store, whole.table(piece), empty) for store in first.stores)
    parts = sorted((f for f in fragments if f.piece.numel), key=lambda one: one.piece.first)
    for number, store in enumerate(stores):
        runs = [part.stores[number] for part in parts]
        if piece.is_quantized:
            _join_blocks(store, runs)
        else:
            for part, run in zip(parts, runs, strict=True):
                store.dense[_place(part.piece)] = run.read(0, part.piece.numel)
    return replace(
        first,
        memory={
            name: max(fragment.memory[name] for fragment in fragments) for name in first.memory
        },
        stores=stores,
        weights=_values(fragments, "weights", empty) if with_weights else None,
        correction=_values(fragments, "correction", empty),
    )


def _place(piece: Piece) -> slice:
    return slice(piece.first, piece.first + piece.numel)


def _join_blocks(whole: MomentStore, runs: list[MomentStore]) -> None:
    """Copy the codes and scales of all runs, in order; encode the blocks that are cut anew.

    Where both sides of a cut have the same scale, that changes nothing.
    """
    (piece,), cut, last = whole.table.pieces, [], -1
    for run in runs:
        (part,), moment = run.table.pieces, run.piece(0)
        codes = whole.codes[whole.bytes_of(0, part.first, part.first + part.numel)]
        if whole.code.bits == 8:
            codes.copy_(moment.values)
        else:  # two runs may each have one half of a byte
            codes |= moment.values
        first = piece.grid.block_of(part.first)
        if first == last and cut[-1:] != [first]:
            cut.append(first)
        last = first + part.num_blocks - 1
        whole.scales[first : last + 1] = moment.scales
    for block in cut:
        begin, end = piece.grid.start_of(block), min(piece.grid.start_of(block + 1), piece.numel)
        values = []
        for run in runs:
            (part,) = run.table.pieces
            low, high = max(begin, part.first), min(end, part.first + part.numel)
            if low < high:
                values.append(run.read(low - part.first, high - low))
        whole.write(begin, torch.cat(values))


def _values(fragments: list[Fragment], name: str, empty: Empty) -> Tensor | None:
    """Return values that fragments have one of per element, None if one of them has none."""
    parts = [(fragment.piece, getattr(fragment, name)) for fragment in fragments]
    if any(part is None for _, part in parts):
        return None
    whole = empty((math.prod(fragments[0].shape),), dtype=parts[0][1].dtype)
    for piece, part in parts:
        whole[_place(piece)] = part
    return whole


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
        "corrections of weights": fragment.correction is not None,
    }


def _check_cover(fragments: list[Fragment]) -> None:
    """Raise ValueError unless fragments have every element of a parameter once, at one step."""
    first, problems = fragments[0], []
    steps = {fragment.step: fragment.file for fragment in fragments}
    if len(steps) > 1:
        places = ", ".join(f"{step} in {file.name}" for step, file in sorted(steps.items()))
        problems.append(f"its parts have taken different numbers of steps: {places}")
    runs = [(one.piece.first, one.piece.numel, one.file) for one in fragments]
    numel, end = math.prod(first.shape), 0
    for begin, length, file in [*sorted(runs), (numel, 1, None)]:
        if length and begin != end:
            what = "are in no file" if begin > end else f"are in {file.name} again"
            low, high = sorted((begin, end))
            problems.append(f"elements {low} to {high - 1} {what}")
        end = max(end, begin + length)
    if problems:
        raise ValueError(f"{first.file.parent}: {first.name}: {'; '.join(problems)}")


def _room(like: MomentStore, table: PieceTable, empty: Empty) -> MomentStore:
    (piece,) = table.pieces
    if not piece.is_quantized:
        dense = empty((piece.numel,), dtype=torch.float32)
        return MomentStore(None, like.rule, table, dense[:0].byte(), dense[:0], dense)
    codes = empty((piece.num_bytes(like.code.bits),), dtype=torch.uint8)
    if like.code.bits < 8:
        codes.zero_()
    scales = empty((table.num_blocks, *like.code.scale_shape), dtype=torch.float32)
    return MomentStore(like.codec, like.rule, table, codes, scales, scales.flatten()[:0])
