# SPDX-License-Identifier: Apache-2.0
"""How far updates, and the second moments behind them, are from those of fp32 states."""

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

import zero8
from benchmarks.fidelity.coded import CodedAdam
from benchmarks.fidelity.training import flat
from zero8.spec.grid import BlockGrid
from zero8.spec.packing import unpacked


class Errors:
    """Root mean squares of the differences of updates u_q to u, and of their sums, flat float32."""

    def __init__(self, numel: int):
        """Start empty, for this number of parameters."""
        self._difference_squares = self._reference_squares = 0.0
        self._difference_sum, self._reference_sum = torch.zeros(numel), torch.zeros(numel)

    def compare(self, update: Tensor, reference: Tensor) -> None:
        """Add a step."""
        difference = update - reference
        self._difference_squares += torch.dot(difference, difference).item()
        self._reference_squares += torch.dot(reference, reference).item()
        self._difference_sum += difference
        self._reference_sum += reference

    @property
    def rms(self) -> float:
        """RMS(u_q - u) / RMS(u)."""
        return math.sqrt(self._difference_squares / self._reference_squares)

    @property
    def drift(self) -> float:
        """The same of the sums of updates."""
        return (self._difference_sum.norm() / self._reference_sum.norm()).item()


def sqrt_bias(stored: Tensor, reference: Tensor) -> float:
    """Return the geometric mean of sqrt(stored / reference), over elements where both are not 0."""
    both = (stored > 0) & (reference > 0)
    return (0.5 * (stored[both].double() / reference[both].double()).log()).mean().exp().item()


def sqrt_error(stored: Tensor, reference: Tensor) -> float:
    """Return the RMS of sqrt(stored / reference) - 1, over elements whose reference is not 0."""
    nonzero = reference > 0
    ratio = (stored[nonzero].double() / reference[nonzero].double()).sqrt()
    return (ratio - 1).square().mean().sqrt().item()


class Stalls:
    """Which codes of v have not changed since the first ones.

    Attributes:
        last: the last values of v, flat.
    """

    LEAST = 0.01

    def __init__(self):
        """Start empty."""
        self._first, self.last = torch.empty(0), torch.empty(0)

    def add(self, values: Tensor, codes: Tensor) -> None:
        """Add the v of a step, and its codes."""
        if not self._first.numel():
            self._first, self._codes = values, codes
            self._same = torch.ones_like(codes, dtype=torch.bool)
        self._same &= codes == self._codes
        self.last = values

    def share(self, exact: "Stalls") -> float:
        """Return the share of elements that stood still, of those whose exact v moved by 1 %."""
        moved = (exact.last - exact._first).abs() > self.LEAST * exact._first
        return (self._same & moved).sum().item() / max(1, moved.sum().item())


def second_moments(optimizer: Optimizer) -> tuple[Tensor, Tensor]:
    """Return all stored v of an Adam, float32, and their codes, flat."""
    pairs = [_second_moment(optimizer, p) for g in optimizer.param_groups for p in g["params"]]
    values, codes = zip(*pairs, strict=True)
    return flat(values), flat(codes)


def _second_moment(optimizer: Optimizer, p: Tensor) -> tuple[Tensor, Tensor]:
    if isinstance(optimizer, zero8.Adam8bitBlockwise):
        store = optimizer.moments(p)[1]
        values = store.read(0, p.numel())
        if store.codec is None:
            return values, values
        grid = BlockGrid.of(tuple(p.shape), 256)
        return values, unpacked(store.codes, grid, 0, p.numel(), store.code.bits)
    state = optimizer.state[p]
    if isinstance(optimizer, CodedAdam):
        codes = optimizer.code_of(p).v.codes(state["codes"]["v"])
        return optimizer.moments(p)[1], codes.view(torch.uint8) if codes.itemsize == 1 else codes
    if "state2" in state:  # of bitsandbytes
        codes, scales = state["state2"], state["absmax2"]
        return state["qmap2"][codes.long()].view(-1, 256) * scales[:, None], codes
    v = state["exp_avg_sq"]
    if hasattr(v, "dequantize") and hasattr(v, "codes"):  # of torchao
        return v.dequantize(), v.codes
    return v.float(), v
