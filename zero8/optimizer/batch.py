# SPDX-License-Identifier: Apache-2.0
"""A batch: the parameters that take a step together."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from zero8.state.header import Entries

Group = dict[str, Any]
"""A parameter group of an optimizer."""


class Row(NamedTuple):
    """One parameter of a batch; the attributes are those of `Batch`."""

    group: Group
    param: Tensor
    value: Tensor
    grad: Tensor
    state: Entries


class Batch(NamedTuple):
    """The parameters of one step, as parallel lists.

    `values` are the local tensors of the parameters: these themselves, except for DTensors and for
    the classes of `zero8.state.weights`.
    """

    groups: list[tuple[Group, int]]  # in order, each with the number of its parameters
    params: list[Tensor]
    values: list[Tensor]
    grads: list[Tensor]  # of `values`
    states: list[Entries]

    @property
    def group_of_each(self) -> list[Group]:
        """The group of each parameter."""
        return [group for group, count in self.groups for _ in range(count)]

    def rows(self) -> list[Row]:
        """Return the parameters one by one."""
        return list(map(Row, self.group_of_each, *self[1:]))

    def at(self, places: Sequence[int]) -> "Batch":
        """Return the batch of some of the parameters."""
        groups, params = self.group_of_each, [self.params[place] for place in places]
        is_plain = self.values is self.params
        return Batch(
            [(groups[place], 1) for place in places],
            params,
            params if is_plain else [self.values[place] for place in places],
            [self.grads[place] for place in places],
            [self.states[place] for place in places],
        )

    def in_order(self) -> "Batch":
        """Return this batch, with contiguous copies of tensors that are not contiguous."""
        values, grads = ([t.contiguous() for t in ts] for ts in (self.values, self.grads))
        return self._replace(values=values, grads=grads)

    def addresses(self) -> np.ndarray:
        """Return the addresses of values and gradients; (2, parameters) uint64."""
        columns = self.values, self.grads
        return np.array([[t.data_ptr() for t in tensors] for tensors in columns], np.uint64)


Begin = Callable[[Batch, float], Batch]
"""Takes a batch and the factor of its gradients, and returns what is to be stepped now."""


class Beside(Protocol):
    """What steps parameters beside the calls of `step`."""

    def begin(self, optimizer: torch.optim.Optimizer) -> Begin | None:
        """Wait for the steps before; return what takes parameters out of the next, if any does."""

    def wait(self) -> None:
        """Wait for pending steps."""

    def remove(self) -> None:
        """Finish pending steps, and have calls of `step` step all parameters."""


def overlap(addresses: np.ndarray, tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors share memory; their addresses are (tensors,) uint64.

    Threads share out the elements of one kernel call, so two of them may be at the same weight at
    once; then each parameter steps by itself, one after the other.
    """
    extents = np.array([_extent(tensor) for tensor in tensors], np.uint64)
    begins = np.where(extents > 0, addresses, np.uint64(0))
    order, ends = np.argsort(begins, kind="stable"), begins + extents
    return bool((begins[order][1:] < np.maximum.accumulate(ends[order])[:-1]).any())


def _extent(tensor: Tensor) -> int:
    """Return the number of bytes from the first element of a tensor to its last."""
    if not tensor.numel():
        return 0
    ends = ((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + sum(ends)) * tensor.element_size()
