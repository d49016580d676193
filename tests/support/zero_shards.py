# SPDX-License-Identifier: Apache-2.0
"""Puts together again, by parameter, what the ranks hold, and compares it with plain states."""

import math

import torch
from zero_worker import MOMENTS

from zero8.algorithms.adam import ADAM
from zero8.spec.codec import DEFAULT_CODEC, SHARED, codec_named
from zero8.spec.grid import BlockGrid
from zero8.spec.packing import unpacked
from zero8.spec.tiles import bytes_of_codes
from zero8.state.entries import codes_key

LOG = codec_named(DEFAULT_CODEC)


def block_of_elements(shape, block_size):
    """Return the block of each element: rows as short as they may be, cut at block_size.

    Of rows that are narrow in any case, as many as fit are a block.
    """
    index = torch.arange(math.prod(shape))
    narrow = math.prod(shape[1:])
    if narrow < 64:
        return index // narrow // (block_size // narrow)
    kept = max(k for k in range(1, len(shape)) if math.prod(shape[k:]) >= 64)
    row_length = math.prod(shape[kept:])
    per_row = math.ceil(row_length / block_size)
    return index // row_length * per_row + index % row_length // block_size


def unit_of_elements(shape, block_size, codec):
    """Return the unit of each element, which is encoded as one: its block, or band of tiles."""
    block = block_of_elements(shape, block_size)
    if codec != SHARED:
        return block
    return block // BlockGrid.of(shape, block_size).blocks_per_row // 64


def put_together(ranks, block_size, codec=LOG):
    """Return, by parameter, its weights and moments per element, from what all ranks hold.

    Moments are codes and scales, or float32 values and None.  `whole` tells where a unit is not
    cut, `holders` how many ranks hold an element.
    """
    made = {}
    for state in (state for rank in ranks for state in rank["states"]):
        offsets = dict.fromkeys((*MOMENTS, "scales", "dense"), 0)
        for piece in state["pieces"]:
            entry = made.setdefault(piece.name, empty_entry(piece, state))
            here = slice(piece.first, piece.first + piece.numel)
            quantized = "exp_avg_scale" in entry
            entry["holders"][here] += 1
            entry["weights"][here] = state["master"][piece.start : piece.start + piece.numel]
            if quantized:
                block = block_of_elements(piece.shape, block_size)
                touched, local = block[here].unique(return_inverse=True)
                unit = unit_of_elements(piece.shape, block_size, codec)
                count = unit[here].bincount(minlength=len(unit.bincount()))
                entry["whole"][here] = (count == unit.bincount())[unit[here]]
                first_scale = offsets["scales"]
                offsets["scales"] += len(touched)
            for which in MOMENTS:
                codes, scales, dense = state[which]
                if not quantized:
                    entry[which][here] = dense[offsets["dense"] :][: piece.numel]
                    continue
                place = piece.shape, block_size, piece.first, piece.numel, code_of(codec, which)
                size = num_code_bytes(*place)
                entry[which][here] = by_element(codes[offsets[which] :][:size], *place)
                entry[f"{which}_scale"][here] = scales[first_scale:][local]
                offsets[which] += size
            offsets["dense"] += 0 if quantized else piece.numel
        for which in MOMENTS:
            sizes = [len(tensor) for tensor in state[which]]
            assert sizes == [offsets[which], offsets["scales"], offsets["dense"]]
    return made


def code_of(codec, which):
    return codec.code_of(ADAM.moment(which))


def num_code_bytes(shape, block_size, first, numel, code):
    """Return how many bytes the codes of a shard take: those of each unit that it touches."""
    if code.bits == 8:
        return numel
    grid = BlockGrid.of(shape, block_size)
    if code.bits == 1 / 8:
        row, (codes, num_bytes) = grid.row_length, (64, 1)
    else:
        row, (codes, num_bytes) = grid.code_row_length, {6: (4, 3), 4: (2, 1)}[code.bits]
    return num_bytes * len({(n // row, n % row // codes) for n in range(first, first + numel)})


def by_element(stored, shape, block_size, first, numel, code):
    """Return a byte for each code of a shard."""
    grid = BlockGrid.of(shape, block_size)
    if code.bits == 1 / 8:
        return stored[bytes_of_codes(grid, (first, numel), first, numel)]
    return unpacked(stored, grid, first, numel, code.bits)


def empty_entry(piece, state):
    numel = math.prod(piece.shape)
    entry = {
        "holders": torch.zeros(numel, dtype=torch.int32),
        "whole": torch.ones(numel, dtype=torch.bool),
        "weights": torch.full((numel,), math.nan, dtype=state["master"].dtype),
    }
    for which in MOMENTS:
        entry[which] = torch.zeros(numel, dtype=torch.uint8 if piece.block_size else torch.float32)
        if piece.block_size:
            per_block = state[which][1].shape[1:]
            entry[f"{which}_scale"] = torch.full((numel, *per_block), math.nan)
    return entry


def assert_equals_plain(made, expected, block_size, cut_per_param, codec=LOG):
    """Compare what was put together with plain states, where units are whole.

    Args:
        made: from `put_together`.
        expected: {parameter: (weights, state of the plain optimizer)}.
        block_size: elements per scale.
        cut_per_param: how many units of a parameter boundaries may cut.
        codec: of the moments.
    """
    assert sorted(made) == sorted(expected)
    for parameter, (weights, state) in expected.items():
        entry = made[parameter]
        whole = entry["whole"]
        assert entry["holders"].eq(1).all(), parameter
        assert entry["weights"].dtype == weights.dtype
        assert torch.equal(entry["weights"][whole], weights.flatten()[whole]), parameter
        quantized = "exp_avg_scale" in entry
        if quantized:
            block = block_of_elements(weights.shape, block_size)
            unit = unit_of_elements(weights.shape, block_size, codec)
            assert unit[~whole].unique().numel() <= cut_per_param, parameter
        for which in MOMENTS:
            if not quantized:
                assert torch.equal(entry[which], state[which].flatten()), parameter
                continue
            code, scales = code_of(codec, which), entry[f"{which}_scale"]
            stored = state[codes_key(ADAM.moment(which), code)].flatten()
            codes = by_element(stored, weights.shape, block_size, 0, weights.numel(), code)
            assert torch.equal(entry[which][whole], codes[whole]), parameter
            per_block = state[f"{which}_scale"].reshape(-1, *scales.shape[1:])
            assert torch.equal(scales[whole], per_block[block][whole]), parameter
