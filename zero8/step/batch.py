# SPDX-License-Identifier: Apache-2.0
"""The parameters that take a step together, and where their tensors are."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from zero8.op.describe import addresses_if_same, described
from zero8.state.kind import Contents


@dataclass(frozen=True)
class Batch:
    """The parameters of one step, as parallel lists."""

    groups: list[dict]
    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict]

    @classmethod
    def stepping(cls, groups: Iterable[dict], state: Mapping[Tensor, dict]) -> "Batch":
        """Return the parameters that have gradients.

        Args:
            groups: of the optimizer.
            state: of the optimizer; makes an empty one for a parameter that has none.
        """
        batch = cls([], [], [], [])
        for group in groups:
            for p in group["params"]:
                if (grad := p.grad) is not None:
                    batch.groups.append(group)
                    batch.params.append(p)
                    batch.grads.append(grad)
                    batch.states.append(state[p])
        return batch

    @property
    def ids(self) -> list[int]:
        """A number per parameter, different for different ones that exist at the same time."""
        return list(map(id, self.params))

    def at(self, places: Sequence[int]) -> "Batch":
        """Return a batch of some of the parameters."""
        columns = self.groups, self.params, self.grads, self.states
        return Batch(*([column[place] for place in places] for column in columns))

    def singles(self) -> list["Batch"]:
        """Return a batch for each of the parameters."""
        return [self.at([place]) for place in range(len(self.params))]

    def contiguous(self) -> "Batch":
        """Return this batch, with copies of the tensors whose elements lie in another order."""
        copies = [[t.contiguous() for t in tensors] for tensors in (self.params, self.grads)]
        return Batch(self.groups, *copies, self.states)

    def addresses(self) -> np.ndarray:
        """Return where parameters and gradients are; (2, parameters) uint64."""
        columns = self.params, self.grads
        return np.array([[t.data_ptr() for t in tensors] for tensors in columns], np.uint64)

    def copy_to(self, batch: "Batch") -> None:
        """Write parameters that are copies of another batch's back to it."""
        for p, ours in zip(batch.params, self.params, strict=True):
            if p is not ours:
                p.copy_(ours)


class Seen:
    """Where the tensors of a batch were when it was looked at, and of what kind.

    Attributes:
        addresses: (2, parameters) uint64, of parameters and gradients.
    """

    def __init__(self, batch: Batch, contents: Contents):
        """Look at a batch.

        Args:
            batch: of parameters that have states.
            contents: of the states, from their kinds.
        """
        self._description, entries = contents
        self._count = len(batch.params)
        self._records = described([*batch.params, *batch.grads, *entries])
        self.addresses = self._tensors["data"].copy()

    def again(self, batch: Batch, contents: Contents) -> np.ndarray | None:
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
        objects = [*batch.params, *batch.grads, *entries]
        addresses = addresses_if_same(objects, self._records, 2 * self._count)
        return None if addresses is None else addresses.reshape(2, -1)

    @property
    def contiguous(self) -> np.ndarray:
        """Whether the elements of parameters and gradients lie in order; (2, parameters) bool."""
        return self._tensors["contiguous"].astype(bool)

    @property
    def devices(self) -> np.ndarray:
        """A number per parameter, equal for equal devices."""
        return self._tensors["kind"][0] >> 32

    @property
    def _tensors(self) -> np.ndarray:
        return self._records[: 2 * self._count].reshape(2, -1)
