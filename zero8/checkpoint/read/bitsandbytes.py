# SPDX-License-Identifier: Apache-2.0
"""Converts 8-bit AdamW states of bitsandbytes to zero8's `dynamic` codec and back.

Both use the same maps (arXiv:2110.02861) and keep per parameter `step`, 8-bit codes, and one
float32 scale per block.  They differ in two points:

* bitsandbytes divides the flattened parameter into blocks of 256, which are zero8's for some shapes
  (`zero8.checkpoint.read.flat_blocks`).
* The scale of a block of m is the largest magnitude in bitsandbytes, and in zero8 the extreme
  element with its sign, so that it decodes exactly.

If the blocks coincide, import keeps codes and scales.  Export does, too, except that it re-encodes
blocks of m with a negative scale, within half a code.  Otherwise moments are decoded to float32,
and quantized by the optimizer that loads them.
"""

import torch
from torch import Tensor

from zero8.checkpoint.read.flat_blocks import (
    block_numbers,
    coincide,
    dynamic_map,
    imported,
    is_map_of,
    options_of,
)
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, quantize
from zero8.spec.dynamic import DynamicCode
from zero8.state.extent import Extent
from zero8.state.header import StateHeader
from zero8.state.plain import PlainState

BLOCK_SIZE = 256
_KEYS = {"exp_avg": ("state1", "absmax1", "qmap1"), "exp_avg_sq": ("state2", "absmax2", "qmap2")}


def is_of_bitsandbytes(state: object) -> bool:
    """Return whether the state of a parameter has the entries of bitsandbytes."""
    return isinstance(state, dict) and "state1" in state


def from_bitsandbytes(state_dict: dict) -> dict:
    """Return a state dict for `Adam8bitBlockwise(codec="dynamic").load_state_dict`.

    Args:
        state_dict: of `bitsandbytes.optim.AdamW8bit`: per parameter `step`, `state1`, `state2`
            (shaped as the parameter), and for 8-bit ones `absmax1`, `absmax2` (numel/256,),
            `qmap1`, `qmap2` (256,).

    Raises:
        ValueError: if the maps are not the dynamic maps, or sizes do not match.
    """
    states = {index: _imported(index, s) for index, s in state_dict["state"].items()}
    groups = [options_of(group) for group in state_dict["param_groups"]]
    return {"state": states, "param_groups": groups}


def to_bitsandbytes(state_dict: dict) -> dict:
    """Return a state dict for `bitsandbytes.optim.AdamW8bit.load_state_dict`.

    Args:
        state_dict: of `Adam8bitBlockwise`; any codec and block size.

    Raises:
        ValueError: if a state is of another optimizer.
    """
    states = {index: _exported(state) for index, state in state_dict["state"].items()}
    return {"state": states, "param_groups": state_dict["param_groups"]}


def _imported(index: int, state: dict) -> dict:
    if "absmax1" not in state:
        dense = {name: state[_KEYS[name][0]] for name in ADAM.moment_names}
        return {"step": int(state["step"]), **dense}
    moments = {name: _checked(state, name) for name in ADAM.moment_names}
    return imported(index, int(state["step"]), CODECS["dynamic"], BLOCK_SIZE, moments)


def _checked(state: dict, name: str) -> tuple[Tensor, Tensor]:
    codes, scales, levels = (state[key] for key in _KEYS[name])
    if not is_map_of(dynamic_map(name), levels.float().cpu()):
        raise ValueError(
            f"{_KEYS[name][2]}: not the dynamic map of {name}; zero8 reads states of "
            "bitsandbytes' 8-bit Adam and AdamW only"
        )
    expected = -(-codes.numel() // BLOCK_SIZE)
    if scales.numel() != expected:
        raise ValueError(
            f"{_KEYS[name][1]}: got {scales.numel()} scales, expected {expected}, one per "
            f"{BLOCK_SIZE} elements; block-wise states only"
        )
    return codes, scales.float()


def _exported(state: dict) -> dict:
    header = StateHeader.of(state, "")
    if header.algorithm is not ADAM:
        raise ValueError(
            f"got a state of {header.algorithm.class_name}, expected one of {ADAM.class_name}, for "
            "bitsandbytes' AdamW8bit"
        )
    shape, block_size = header.shape, header.block_size
    exported: dict = {"step": int(state["step"])}
    if block_size == 0:
        return exported | {_KEYS[name][0]: state[name] for name in ADAM.moment_names}
    is_dynamic = header.codec == CODECS["dynamic"]
    verbatim = is_dynamic and block_size == BLOCK_SIZE and coincide(shape, BLOCK_SIZE)
    stores = PlainState.local(state, Extent.whole(shape), "").stores("")
    for store in stores:
        code = dynamic_map(store.name)
        if verbatim:
            codes, scales = store.codes.clone(), store.scales
        else:
            codes, scales = _flat_codes(code, store.read(0, store.table.numel))
        _make_positive(code, codes, scales)
        keys = _KEYS[store.name]
        values = (codes.view(shape), scales.abs(), code.levels.to(codes.device, copy=True))
        exported |= dict(zip(keys, values, strict=True))
    return exported


def _flat_codes(code: DynamicCode, x: Tensor) -> tuple[Tensor, Tensor]:
    block = block_numbers(x, BLOCK_SIZE)
    return quantize(code, x, block, int(block[-1]) + 1)


def _make_positive(code: DynamicCode, codes: Tensor, scales: Tensor) -> None:
    """Re-encode, in place, the blocks whose scale is negative, for the scale's magnitude."""
    levels, thresholds = code.levels.to(codes.device), code.thresholds.to(codes.device)
    negative = (scales < 0)[block_numbers(codes, BLOCK_SIZE)]
    mirrored = -levels[codes[negative].to(torch.int64)]
    codes[negative] = torch.searchsorted(thresholds, mirrored, right=True).to(torch.uint8)
