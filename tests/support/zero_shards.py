# SPDX-License-Identifier: Apache-2.0
"""Puts together again, by parameter, what the ranks hold, and compares it with plain states."""

import math

import torch
from zero_worker import MOMENTS

from zero8.spec.grid import BlockGrid
from zero8.spec.packing import unpacked


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


def put_together(ranks, block_size, bits=8):
    """Return, by parameter, its weights and moments per element, from what all ranks hold.

    Moments are codes and scales, or float32 values and None.  `whole` tells where a block is not
    cut, `holders` how many ranks hold an element.
    """
    made = {}
    for state in (state for rank in ranks for state in rank["states"]):
        offsets = {True: 0, False: 0, "scales": 0}
        for piece in state["pieces"]:
            entry = made.setdefault(piece.name, empty_entry(piece, state))
            here = slice(piece.first, piece.first + piece.numel)
            quantized = "exp_avg_scale" in entry
            entry["holders"][here] += 1
            entry["weights"][here] = state["master"][piece.start : piece.start + piece.numel]
            place = piece.shape, block_size, piece.first, piece.numel, bits
            size = num_code_bytes(*place) if quantized else piece.numel
            there = slice(offsets[quantized], offsets[quantized] + size)
            offsets[quantized] += size
            if quantized:
                block = block_of_elements(piece.shape, block_size)
                touched, local, count = block[here].unique(return_inverse=True, return_counts=True)
                whole = count == block.bincount()[touched]
                entry["whole"][here] = whole[local]
                first_scale = offsets["scales"]
                offsets["scales"] += len(touched)
            for which in MOMENTS:
                codes, scales, dense = state[which]
                entry[which][here] = by_element(codes[there], *place) if quantized else dense[there]
                if quantized:
                    entry[f"{which}_scale"][here] = scales[first_scale:][local]
        for which in MOMENTS:
            sizes = [len(tensor) for tensor in state[which]]
            assert sizes == [offsets[True], offsets["scales"], offsets[False]]
    return made


def num_code_bytes(shape, block_size, first, numel, bits):
    """Return how many bytes the codes of a shard take: those of each unit that it touches."""
    if bits == 8:
        return numel
    grid = BlockGrid.of(shape, block_size)
    row, (codes, num_bytes) = grid.code_row_length, {6: (4, 3), 4: (2, 1)}[bits]
    return num_bytes * len({(n // row, n % row // codes) for n in range(first, first + numel)})


def by_element(stored, shape, block_size, first, numel, bits):
    """Return a byte for each code of a shard."""
    return unpacked(stored, BlockGrid.of(shape, block_size), first, numel, bits)


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


def assert_equals_plain(made, expected, block_size, cut_per_param):
    """Compare what was put together with plain states, where blocks are whole."""
    assert sorted(made) == sorted(expected)
    for parameter, (weights, state) in expected.items():
        entry = made[parameter]
        whole = entry["whole"]
        assert entry["holders"].eq(1).all(), parameter
        assert entry["weights"].dtype == weights.dtype
        assert torch.equal(entry["weights"][whole], weights.flatten()[whole]), parameter
        bits = next((bits for bits in (8, 6, 4) if f"exp_avg_q{bits}" in state), None)
        if bits:
            block = block_of_elements(weights.shape, block_size)
            assert block[~whole].unique().numel() <= cut_per_param, parameter
        for which in MOMENTS if bits else ():
            stored, scales = state[f"{which}_q{bits}"].flatten(), entry[f"{which}_scale"]
            codes = by_element(stored, weights.shape, block_size, 0, weights.numel(), bits)
            assert torch.equal(entry[which][whole], codes[whole]), parameter
            per_block = state[f"{which}_scale"].reshape(-1, *scales.shape[1:])
            assert torch.equal(scales[whole], per_block[block][whole]), parameter
        for which in () if bits else MOMENTS:
            assert torch.equal(entry[which], state[which].flatten()), parameter
