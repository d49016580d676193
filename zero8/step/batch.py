# SPDX-License-Identifier: Apache-2.0
"""A batch: the parameters that take a step together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from zero8.state.extent import local
from zero8.state.header import Entries
from zero8.state.weights import values_of

Group = dict[str, Any]
"""A parameter group of an optimizer."""
Column = TypeVar("Column")


@dataclass(frozen=True)
class Batch:
    """The parameters of one step, as parallel lists.

    Attributes:
        groups: the optimizer's group of each parameter.
        params: the parameters in these groups.
        values: the local tensor of each parameter: itself, except for a DTensor and for the classes
            of `zero8.state.weights`.
        grads: the gradient of each of `values`.
        states: the state of each parameter.
    """

    groups: list[Group]
    params: list[Tensor]
    values: list[Tensor]
    grads: list[Tensor]
    states: list[Entries]

    @classmethod
    def single(
        cls, group: Group, p: Tensor, grad: Tensor, state: Mapping[Tensor, Entries]
    ) -> "Batch":
        """Return the batch of one parameter, with a gradient that is not its `grad`."""
        return cls([group], [p], [values_of(p)], [local_grad(p, grad)], [state[p]])

    def at(self, places: Sequence[int]) -> "Batch":
        """Return a batch of some of the parameters."""

        def chosen(column: list[Column]) -> list[Column]:
            return [column[place] for place in places]

        return Batch(
            chosen(self.groups),
            chosen(self.params),
            chosen(self.values),
            chosen(self.grads),
            chosen(self.states),
        )

    def singles(self) -> list["Batch"]:
        """Return a batch for each of the parameters."""
        return [self.at([place]) for place in range(len(self.params))]

    def contiguous(self) -> "Batch":
        """Return this batch, with contiguous copies of tensors that are not contiguous."""
        values, grads = ([t.contiguous() for t in ts] for ts in (self.values, self.grads))
        return Batch(self.groups, self.params, values, grads, self.states)

    def addresses(self) -> np.ndarray:
        """Return the addresses of parameters and gradients; (2, parameters) uint64."""
        columns = self.values, self.grads
        return np.array([[t.data_ptr() for t in tensors] for tensors in columns], np.uint64)

    def copy_to(self, batch: "Batch") -> None:
        """Copy the values back to the batch that `contiguous` was called on."""
        for values, ours in zip(batch.values, self.values, strict=True):
            if values is not ours:
                values.copy_(ours)


def local_grad(p: Tensor, grad: Tensor) -> Tensor:
    """Return the local tensor of a gradient, redistributed to its parameter's placements."""
    if not hasattr(p, "placements") or not hasattr(grad, "placements"):
        return grad
    ours: Any = p  # a DTensor, as its gradient
    theirs: Any = grad
    if theirs.placements != ours.placements:
        # A collective: with tensor parallelism, all ranks get here.
        grad = theirs.redistribute(ours.device_mesh, ours.placements)
    return local(grad)
