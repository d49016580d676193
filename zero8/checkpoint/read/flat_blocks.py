# SPDX-License-Identifier: Apache-2.0
"""States of other libraries' Adam, whose blocks run through the flattened parameter.

zero8 divides rows, and groups narrow ones.  The blocks coincide if rows, or groups of narrow rows,
are a multiple of a block long.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from zero8.spec import dither
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, Codec, dequantize
from zero8.spec.dynamic import DynamicCode
from zero8.spec.grid import MAX_BLOCK_SIZE, MIN_BLOCK_SIZE, BlockGrid
from zero8.spec.levels import NearestEntry
from zero8.spec.packing import packed
from zero8.state.entries import codes_key
from zero8.state.memory import unknown_memory
from zero8.state.plain import format_entry
from zero8.state.table import Piece


def imported(
    index: int,
    step: int,
    codec: Codec,
    block_size: int,
    moments: Mapping[str, tuple[Tensor, Tensor]],
) -> dict:
    """Return Adam's state of a parameter: verbatim if the blocks coincide, else in float32.

    Moments are codes shaped as the parameter, a uint8 each, and float32 scales of blocks.
    """
    shape = tuple(moments[ADAM.moment_names[0]][0].shape)
    if not coincide(shape, block_size):
        return {
            "step": step,
            **{name: _decoded(codec, name, block_size, *moments[name]) for name in moments},
        }
    numel = torch.Size(shape).numel()
    piece = Piece(0, numel, 0, shape, dither.identity_of(index), block_size, str(index))
    entries = format_entry(ADAM, codec, piece) | {"step": step, **unknown_memory(ADAM)}
    for name, (codes, scales) in moments.items():
        rule = ADAM.moment(name)
        code = codec.code_of(rule)
        stored = packed(codes.reshape(-1), piece.grid, 0, code.bits)
        entries[codes_key(rule, code)] = stored.view(piece.grid.code_shape(shape, code.bits))
        entries[f"{name}_scale"] = scales.view(piece.grid.scale_shape(shape))
    return entries


def options_of(group: dict) -> dict:
    """Return the entries of a parameter group that the libraries' AdamW shares with zero8's.

    torchao keeps the learning rate in a tensor.
    """
    keys = ("params", "param_names", "lr", "betas", "eps", "weight_decay")
    found = {key: group[key] for key in keys if key in group}
    return {k: v.item() if isinstance(v, Tensor) else v for k, v in found.items()}


def _decoded(codec: Codec, name: str, block_size: int, codes: Tensor, scales: Tensor) -> Tensor:
    code, flat = codec.code_of(ADAM.moment(name)), codes.reshape(-1)
    return dequantize(code, flat, scales, block_numbers(flat, block_size)).view(codes.shape)


def block_numbers(x: Tensor, block_size: int) -> Tensor:
    """Return the block of each element of a flattened parameter, (numel,) int64."""
    return torch.arange(x.numel(), dtype=torch.int64, device=x.device) // block_size


def coincide(shape: tuple[int, ...], block_size: int) -> bool:
    """Return whether the blocks are those of zero8."""
    is_size = MIN_BLOCK_SIZE <= block_size <= MAX_BLOCK_SIZE and block_size & block_size - 1 == 0
    grid = BlockGrid.of(shape, block_size) if is_size else None
    return grid is not None and grid.row_length % block_size == 0


def dynamic_map(name: str) -> DynamicCode:
    """Return the dynamic map of one of Adam's moments."""
    code = CODECS["dynamic"].code_of(ADAM.moment(name))
    assert isinstance(code, DynamicCode), "the codec `dynamic` has no other codes"
    return code


def is_map_of(code: NearestEntry, levels: Tensor) -> bool:
    """Return whether levels are the entries of a code's map, ascending."""
    ours = code.entries
    # Without AVX2, torch rounds some entries of the libraries' maps differently.
    return levels.shape == ours.shape and torch.allclose(levels, ours, rtol=2.0**-20, atol=0.0)
