# SPDX-License-Identifier: Apache-2.0
"""Both of Adam's moments in 8 bits, by a map of the paper or by zero8's `log`.

The functions in `MAPS` take a tensor scaled to [-1, 1], which only `quantile` looks at, and whether
it has negative elements (m) or not (v).  They return the values of the codes in ascending order,
float32.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.fidelity.coded import WHOLE, Code, CodedAdam, Pair, Stored
from benchmarks.fidelity.runs import replay
from benchmarks.fidelity.schemes import SCHEMES, Scheme
from benchmarks.fidelity.training import Setting
from zero8.spec import dither
from zero8.spec.codec import CODECS, dequantize, quantize
from zero8.spec.grid import BlockGrid
from zero8.spec.log import settling

BETA1 = 0.9
LOG = "log"
GRAINS = {"block": 256, "tensor": WHOLE}
"""What one scale serves, and its elements."""
Levels = Callable[[Tensor, bool], Tensor]


def linear(x: Tensor, signed: bool) -> Tensor:
    """Return i/127 for i from -127 to 127, which has 0 but one value less, or i/255 for v."""
    return torch.arange(-127, 128) / 127 if signed else torch.arange(256) / 255


def quantile(x: Tensor, signed: bool) -> Tensor:
    """Return the quantile map of a tensor's own elements.

        q_i = (Q(i/257) + Q((i+1)/257)) / 2,  i from 0 to 255

    Q is the quantile function of the elements, linear between them.
    """
    edges = torch.quantile(x.flatten(), torch.arange(257) / 257)
    return (edges[:-1] + edges[1:]) / 2


def dynamic(x: Tensor, signed: bool) -> Tensor:
    """Return the dynamic tree map, whose values zero8's `dynamic` has as well."""
    codec = CODECS["dynamic"]
    return (codec.of_signed if signed else codec.of_unsigned).levels


MAPS = {"linear": linear, "quantile": quantile, "dynamic": dynamic}
NAMES = (*MAPS, LOG)


def of_map(levels_of: Levels, block_size: int, signed: bool) -> Code:
    """Return the code of the nearest value of a map, as the paper defines it.

        code = argmin_j |q_j - x/scale|,  decoded = q_code * scale,  scale = max |x| of the block

    A map that depends on data is made for each tensor, of all its blocks.
    """

    def encode(x: Tensor, step: int) -> Stored:
        scale = x.abs().amax(1, keepdim=True)
        normalized = x / scale.clamp(min=1e-38)
        levels = levels_of(normalized, signed)
        codes = torch.bucketize(normalized, (levels[:-1] + levels[1:]) / 2).to(torch.uint8)
        return [codes, scale, levels]

    return Code(encode, lambda codes, scale, levels: levels[codes.long()] * scale, block_size)


def of_log(block_size: int, signed: bool) -> Code:
    """Return zero8's `log` as a step writes it: m settles, and v is dithered.

    Codes of m are int8, so that they ascend.
    """
    codec = CODECS[LOG]
    code, dtype = (codec.of_signed, torch.int8) if signed else (codec.of_unsigned, torch.uint8)

    def encode(x: Tensor, step: int) -> Stored:
        numel, row_length = x.numel(), x.shape[1]
        grid = BlockGrid(1, numel, row_length)
        thresholds = dither.in_blocks(dither.phase_of(0, step), 0, numel, grid)
        blocks = torch.arange(numel) // row_length
        settles = settling(BETA1) if signed else None
        codes, scales = quantize(code, x.reshape(-1), blocks, len(x), thresholds, settles)
        return [codes.view(x.shape).view(dtype), scales]

    def decode(codes: Tensor, scales: Tensor) -> Tensor:
        blocks = torch.arange(codes.numel()) // codes.shape[1]
        x = dequantize(code, codes.reshape(-1).view(torch.uint8), scales, blocks)
        return x.view(codes.shape)

    return Code(encode, decode, block_size)


def code_of(name: str, grain: str) -> Pair:
    """Return the code of a name in NAMES, with one scale per block or per tensor."""
    make = of_log if name == LOG else partial(of_map, MAPS[name])
    return Pair(make(GRAINS[grain], True), make(GRAINS[grain], False))


CARRIED = {
    (name, grain): Scheme(partial(CodedAdam, code_of(name, grain)))
    for grain in GRAINS
    for name in NAMES
} | {(LOG, "block"): SCHEMES[LOG], ("dynamic of zero8", "block"): SCHEMES["dynamic"]}
"""States that are kept for a whole run, by name and grain."""


def carry(setting: Setting) -> list[dict]:
    """Replay a setting's run with all of them.  Processes find them here: they are not pickled."""
    return replay(setting, CARRIED)
