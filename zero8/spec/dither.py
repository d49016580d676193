# SPDX-License-Identifier: Apache-2.0
"""Randomness as a function: rounding thresholds from (seed, step, parameter identity, element).

    r(i, t) = i * A + key +- t * PHI + h(key, n)   modulo 2^32,   n = t div 32                (D1)

with + where n is odd and - where it is even.  A and PHI are 2^32 divided by the plastic number
(Roberts' R2 sequence) and by the golden ratio; h is a hash.  Over the elements of a parameter r is
equidistributed, so each step's rounding is unbiased.  Over 32 steps of one element it is the
golden-ratio sequence, the one of lowest discrepancy, so the accumulated rounding error stays near
one cell instead of growing like a random walk.

Gradients that repeat after a Fibonacci number of steps meet thresholds that move by little from
period to period, and always the same way.  Two remedies:

- h starts each run of 32 steps elsewhere.  Without it, periods of 34, 55 or 89 steps would meet
  nearly the same thresholds again and again, and give more than double the error of independent
  thresholds.
- Runs alternate in direction.  A threshold that rises a little from period to period correlates
  with the state, which it has raised or not, and biases v: without alternation sqrt(v) is 1.7 % too
  large at beta2 0.99 and period 5, 0.7 % too small at period 3, as once measured.
  In the other direction the bias has the other sign.

Kernels use thresholds of 16 bits, computed by 16-bit additions, which are cheaper than 32-bit ones.
So element i of a block (`zero8.spec.grid`) that begins at element i0 of the parameter has the
threshold

    q(i, t) = floor(r(i0, t) / 2^16) + (i - i0) * C   modulo 2^16                            (D2)

where C = 32 * 1601: no odd multiple of 32 has multiples that are more evenly spread over the range.
The sequence repeats after 2048 elements; each block starts elsewhere.

`hashed` stochastic rounding passes (D1), element by element, through a 32-bit mixer instead
(Wellons' lowbias32): every element and step independent.  Nothing is drawn and no generator state
exists: the same numbers come out for any thread count, world size, device and restart.
"""

import hashlib
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from zero8.spec.grid import BlockGrid

ELEMENT_STEP = 0xC13FA9A9
IN_BLOCK_STEP = 32 * 1601
GOLDEN_STEP = 0x9E3779B9
RUN_STEPS = 32
HASH_FACTORS = 0x7FEB352D, 0x846CA68B
"""The multipliers of lowbias32."""
_MASK = 0xFFFFFFFF

Integers = TypeVar("Integers", int, np.ndarray)
Bits = TypeVar("Bits", int, np.ndarray, Tensor)


def identity_of(name_or_index: str | int) -> int:
    """Return the 64-bit identity of a parameter: a hash of its name, else of its index."""
    kind = "name" if isinstance(name_or_index, str) else "index"
    digest = hashlib.blake2b(f"{kind}:{name_or_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def stream_key(seed: int, identity: int, stream: str) -> int:
    """Return the 32-bit key of one stream of thresholds (`exp_avg_sq` or `param`)."""
    digest = hashlib.blake2b(f"{seed}:{identity}:{stream}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def phase_of(key: Integers, step: Integers) -> Integers:
    """Return r(0, t) of equation (D1), in which kernels get seed, identity and step.

    Key and step are integers, or int64 arrays.
    """
    run = step // RUN_STEPS
    start = _mixed((key + run * ELEMENT_STEP) & _MASK)
    direction = run % 2 * 2 - 1
    phase: Integers = (key + direction * step * GOLDEN_STEP + start) & _MASK
    return phase


def dithered(phase: int, first: int, numel: int) -> Tensor:
    """Return r(i, t) of equation (D1) for elements first .. first + numel - 1.

    Shape (numel,), int64 holding unsigned 32-bit values.
    """
    index = torch.arange(first, first + numel, dtype=torch.int64) & _MASK
    return (index * ELEMENT_STEP + phase) & _MASK


def in_blocks(phase: int, first: int, numel: int, grid: BlockGrid) -> Tensor:
    """Return q(i, t) of equation (D2) for elements first .. first + numel - 1 of a parameter.

    Shape (numel,), int64 holding unsigned 16-bit values.
    """
    index = torch.arange(first, first + numel, dtype=torch.int64)
    offset = index % grid.row_length % grid.block_size
    start = ((index - offset & _MASK) * ELEMENT_STEP + phase & _MASK) >> 16
    return start + offset * IN_BLOCK_STEP & 0xFFFF


def hashed(phase: int, first: int, numel: int) -> Tensor:
    """Return the upper half of lowbias32(r(i, t)) for elements first .. first + numel - 1.

    Shape (numel,), int64 holding unsigned 16-bit values.
    """
    return _mixed(dithered(phase, first, numel)) >> 16


def _mixed(x: Bits) -> Bits:
    """Return lowbias32 of an unsigned 32-bit number, or of each in an int64 tensor."""
    # int64 products wrap modulo 2^64, which keeps their low 32 bits right.
    x = ((x ^ (x >> 16)) * HASH_FACTORS[0]) & _MASK
    x = ((x ^ (x >> 15)) * HASH_FACTORS[1]) & _MASK
    mixed: Bits = x ^ (x >> 16)
    return mixed
