# SPDX-License-Identifier: Apache-2.0
"""A batch: the parameters that take a step together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from zero8.state.extent import local_grad
from zero8.state.header import Entries
from zero8.state.weights import values_of

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

    Attributes:
        groups: the optimizer's groups, in order, each with the number of its parameters.
        params: the parameters in these groups.
        values: the local tensor of each parameter: itself, except for a DTensor and for the classes
            of `zero8.state.weights`.
        grads: the gradient of each of `values`.
        states: the state of each parameter.
    """

    groups: list[tuple[Group, int]]
    params: list[Tensor]
    values: list[Tensor]
    grads: list[Tensor]
    states: list[Entries]

    @classmethod
    def one(cls, group: Group, p: Tensor, grad: Tensor, state: Entries) -> "Batch":
        """Return the batch of a parameter with a gradient, which may not be its `grad`."""
        return cls([(group, 1)], [p], [values_of(p)], [local_grad(p, grad)], [state])

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
