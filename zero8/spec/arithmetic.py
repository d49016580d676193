# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the optimizer step: IEEE binary32 with fma and flush to zero, in PyTorch.

Every kernel computes with single correctly rounded operations (round half to even), subnormal
inputs read as zero and subnormal results written as zero (x86: FTZ and DAZ, which each kernel
thread sets and restores).  PyTorch has no fma and leaves the treatment of subnormals to the
thread's mode, so the reference computes in binary64 and rounds once:

* the product of two binary32 numbers is exact in binary64, and division and square root rounded
  to binary64 first round to the same binary32 (53 >= 2 * 24 + 2 bits; Figueroa, "When is double
  rounding innocuous?", 1995);
* for fma the binary64 sum is rounded to odd, after which the second rounding is innocuous too
  (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
  rounding to odd", 2008).

All functions take and return float32 tensors (or Python floats that are float32 values).
"""

import torch
from torch import Tensor

SMALLEST_NORMAL = 2.0**-126

# x86 decides that a result is tiny after rounding it with an unbounded exponent, so the last
# quarter of an ulp below 2^-126 still rounds up to it.
_TINY = 2.0**-126 - 2.0**-151


def _wide(x: Tensor | float) -> Tensor:
    if not isinstance(x, Tensor):
        # One number on the CPU goes with tensors on any device.
        x = torch.tensor(x, dtype=torch.float32, device="cpu")
    return flush(x.to(torch.float32)).to(torch.float64)


def _narrow(x: Tensor) -> Tensor:
    return torch.where(x.abs() < _TINY, torch.zeros_like(x).copysign(x), x).to(torch.float32)


def flush(x: Tensor) -> Tensor:
    """Return `x` with subnormals replaced by zeros of the same sign."""
    return torch.where(x.abs() < SMALLEST_NORMAL, torch.zeros_like(x).copysign(x), x)


def mul(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return a * b, rounded once."""
    return _narrow(_wide(a) * _wide(b))


def div(a: Tensor | float, b: Tensor | float) -> Tensor:
    """Return a / b, rounded once."""
    return _narrow(_wide(a) / _wide(b))


def sqrt(a: Tensor) -> Tensor:
    """Return the square root of a, rounded once."""
    return _narrow(_wide(a).sqrt())


def fma(a: Tensor | float, b: Tensor | float, c: Tensor | float) -> Tensor:
    """Return a * b + c, rounded once."""
    product, addend = _wide(a) * _wide(b), _wide(c)
    total = product + addend
    # Knuth's TwoSum: total + error is the exact sum.
    other = total - product
    error = (product - (total - other)) + (addend - other)
    bits = total.view(torch.int64)
    inexact = (error != 0) & error.isfinite() & (bits & 1 == 0)
    toward_error = torch.where((error > 0) == (total > 0), 1, -1)
    return _narrow(torch.where(inexact, bits + toward_error, bits).view(torch.float64))
