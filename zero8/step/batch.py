# SPDX-License-Identifier: Apache-2.0
"""The parameters that take a step together, and where their tensors are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from zero8.op.describe import addresses_if_same, described
from zero8.state.extent import PLAIN, local
from zero8.state.header import Entries
from zero8.state.kind import RecordKey

Group = dict[str, Any]
"""A parameter group of an optimizer."""
Column = TypeVar("Column")


@dataclass(frozen=True)
class Batch:
    """The parameters of one step, as parallel lists.

    Attributes:
        groups: of the optimizer, to which they belong.
        params: as they stand there.
        values: what this rank holds of each; itself, but for a DTensor.
        grads: of the values.
        states: of the parameters.
    """

    groups: list[Group]
    params: list[Tensor]
    values: list[Tensor]
    grads: list[Tensor]
    states: list[Entries]

    @classmethod
    def stepping(cls, groups: Iterable[Group], state: Mapping[Tensor, Entries]) -> "Batch":
        """Return the parameters that have gradients.

        Args:
            groups: of the optimizer.
            state: of the optimizer; makes an empty one for a parameter that has none.
        """
        batch = cls([], [], [], [], [])
        for group in groups:
            for p in group["params"]:
                if (grad := p.grad) is not None:
                    batch.groups.append(group)
                    batch.params.append(p)
                    is_plain = type(p) in PLAIN  # as most are: no call for them
                    batch.values.append(p if is_plain else local(p))
                    batch.grads.append(grad if is_plain else local_grad(p, grad))
                    batch.states.append(state[p])
        return batch

    @classmethod
    def single(
        cls, group: Group, p: Tensor, grad: Tensor, state: Mapping[Tensor, Entries]
    ) -> "Batch":
        """Return one parameter of a group with a gradient that it does not hold."""
        return cls([group], [p], [local(p)], [local_grad(p, grad)], [state[p]])

    @property
    def ids(self) -> list[int]:
        """A number per parameter, different for different ones that exist at the same time."""
        return list(map(id, self.params))

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
        """Return this batch, with copies of the tensors whose elements lie in another order."""
        values, grads = ([t.contiguous() for t in ts] for ts in (self.values, self.grads))
        return Batch(self.groups, self.params, values, grads, self.states)

    def addresses(self) -> np.ndarray:
        """Return where parameters and gradients are; (2, parameters) uint64."""
        columns = self.values, self.grads
        return np.array([[t.data_ptr() for t in tensors] for tensors in columns], np.uint64)

    def copy_to(self, batch: "Batch") -> None:
        """Write values that are copies of another batch's back to it."""
        for values, ours in zip(batch.values, self.values, strict=True):
            if values is not ours:
                values.copy_(ours)


class Seen:
    """Where the tensors of a batch were when it was looked at, and of what kind.

    Attributes:
        addresses: (2, parameters) uint64, of parameters and gradients.
    """

    def __init__(self, batch: Batch, contents: RecordKey):
        """Look at a batch.

        Args:
            batch: of parameters that have states.
            contents: of the states, from their kinds.
        """
        self._description, entries = contents
        self._count = len(batch.params)
        self._records = described([*batch.values, *batch.grads, *entries])
        self.addresses = self._tensors["data"].copy()

    def again(self, batch: Batch, contents: RecordKey) -> np.ndarray | None:
        """Return where parameters and gradients are now: `addresses`.

        Args:
            batch: the same parameters.
            contents: of their states.

        Returns:
            None unless all else is as it was, so that the same records fit; also where a parameter
            or a gradient has no memory.
        """
        description, entries = contents
        if description != self._description:
            return None
        objects = [*batch.values, *batch.grads, *entries]
        addresses = addresses_if_same(objects, self._records, 2 * self._count)
        return None if addresses is None else addresses.reshape(2, -1)

    @property
    def contiguous(self) -> np.ndarray:
        """Whether the elements of parameters and gradients lie in order; (2, parameters) bool."""
        return self._tensors["contiguous"].astype(bool)

    @property
    def devices(self) -> np.ndarray:
        """A number per parameter, equal for equal devices."""
        devices: np.ndarray = self._tensors["kind"][0] >> 32
        return devices

    @property
    def _tensors(self) -> np.ndarray:
        return self._records[: 2 * self._count].reshape(2, -1)


def local_grad(p: Tensor, grad: Tensor) -> Tensor:
    """Return what this rank holds of a gradient, sharded as its parameter is."""
    if not hasattr(p, "placements") or not hasattr(grad, "placements"):
        return grad
    ours: Any = p  # a DTensor, as its gradient
    theirs: Any = grad
    if theirs.placements != ours.placements:
        # On all ranks alike: a collective of tensor parallelism.
        grad = theirs.redistribute(ours.device_mesh, ours.placements)
    return local(grad)
