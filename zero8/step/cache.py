# SPDX-License-Identifier: Apache-2.0
"""Caches kernel records between steps.

Making records takes about 100 microseconds per parameter, and checking parameters one by one takes
long too, compared with the step of a small tensor.  The cache holds addresses, never tensors, so it
keeps nothing alive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from zero8.op import kernel
from zero8.op.describe import described
from zero8.spec import dither
from zero8.spec.scalars import StepScalars
from zero8.spec.segment import Segment
from zero8.step.runners import Run

Contents = tuple[object, list[Tensor | float]]
"""What says how to read some states (equal where read alike), and all their entries."""


@dataclass(frozen=True)
class Batch:
    """The parameters of one kernel call, as parallel lists."""

    groups: list[dict]
    params: list[Tensor]
    grads: list[Tensor]
    states: list[dict]

    @cached_property
    def tensors(self) -> tuple[np.ndarray, np.ndarray]:
        """Where parameters and gradients are, and of what kind: `described`."""
        return described(self.params), described(self.grads)

    @property
    def devices(self) -> np.ndarray:
        """A number per parameter, equal for equal devices."""
        return self.tensors[0]["kind"] >> 32

    @property
    def device(self) -> torch.device:
        """Where the parameters are, if all are in one place."""
        return self.params[0].device

    def at(self, places: Sequence[int]) -> "Batch":
        """Return a batch of some of the parameters."""
        columns = self.groups, self.params, self.grads, self.states
        return Batch(*([column[place] for place in places] for column in columns))

    def singles(self) -> list["Batch"]:
        """Return a batch for each of the parameters."""
        return [self.at([place]) for place in range(len(self.params))]

    def contiguous(self) -> "Batch":
        """Return this batch, with copies of the tensors whose elements lie in another order."""
        if all(tensors["contiguous"].all() for tensors in self.tensors):
            return self
        copies = [[t.contiguous() for t in tensors] for tensors in (self.params, self.grads)]
        return Batch(self.groups, *copies, self.states)

    def copy_to(self, batch: "Batch") -> None:
        """Write parameters that are copies of another batch's back to it."""
        for p, ours in zip(batch.params, self.params, strict=True):
            if p is not ours:
                p.copy_(ours)


def premises_of(batch: Batch, contents: Contents) -> tuple | None:
    """Return all that the records of parameters depend on, equal for equal records.

    None where no record can be: what says how to read a state is damaged, a state is not
    contiguous, or a parameter or a gradient has no memory.
    """
    descriptions, entries = contents
    states = described(entries)
    if descriptions is None or not states["contiguous"].all():
        return None
    if any(((seen["data"] == 0) & (seen["numel"] > 0)).any() for seen in batch.tensors):
        return None
    kinds = [seen[name].tobytes() for seen in batch.tensors for name in ("numel", "kind")]
    return descriptions, states.tobytes(), *kinds


@dataclass(eq=False)
class Prepared:
    """The records of one or more parameters.

    Attributes:
        premises: what `premises_of` gave when they were made; they fit where it gives the same,
            and nowhere if it is None.
        records: (pieces,) `kernel.SEGMENT`, in the order of the parameters.  `packed` fills in what
            changes from step to step: addresses of parameters and gradients, phases, scalars.
        offsets: (2, pieces) uint64, in bytes from the address of the parameter, and of the
            gradient, to the piece.
        keys: (2, pieces) int64, of the dithers of the second moment and of the parameter.
        owner: (pieces,) which of the parameters each belongs to.
        labels: what the parameter of each piece is called.
        last: the last step that was taken with these records, None if none was.
    """

    premises: tuple | None
    records: np.ndarray
    offsets: np.ndarray
    keys: np.ndarray
    owner: np.ndarray
    labels: tuple[str, ...]
    last: Run | None = None

    @classmethod
    def of(
        cls,
        premises: tuple | None,
        labels: tuple[str, ...],
        flat: tuple[Tensor, Tensor],
        segments: Sequence[Segment],
        keys: Sequence[tuple[int, int]],
    ) -> "Prepared":
        """Return the records of one parameter.

        Args:
            premises: its own.
            labels: of its pieces.
            flat: the parameter and its gradient, or copies, in one dimension.
            segments: which lie in these two and in the live state.
            keys: of each segment the keys of its two dithers.
        """
        records, _ = kernel.packed(segments, flat[0].device)
        pairs = zip(("param", "grad"), flat, strict=True)
        offsets = np.stack([records[name] - np.uint64(t.data_ptr()) for name, t in pairs])
        columns = np.array(keys, np.int64).reshape(-1, 2).T
        owner = np.zeros(len(records), np.intp)
        return cls(premises, records, offsets, columns, owner, labels)

    @classmethod
    def joined(cls, premises: tuple | None, parts: Sequence["Prepared"]) -> "Prepared":
        """Return the records of parameters that are prepared one by one.

        Args:
            premises: of all of them.
            parts: one each, in order.
        """
        records = np.concatenate([part.records for part in parts])
        offsets = np.concatenate([part.offsets for part in parts], axis=1)
        keys = np.concatenate([part.keys for part in parts], axis=1)
        owner = np.repeat(np.arange(len(parts)), [len(part.records) for part in parts])
        labels = tuple(chain.from_iterable(part.labels for part in parts))
        return cls(premises, records, offsets, keys, owner, labels)


class Moved(NamedTuple):
    """Step number, history and scalars shared by parameters with equal settings.

    Attributes:
        step: the number of the step, from 1.
        history: bound on m^2/v after it.
        scalars: of the step.
    """

    step: int
    history: float
    scalars: StepScalars


def packed(
    prepared: Prepared, batch: Batch, moved: Sequence[Moved], which: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the kernel's structs of a step: as `kernel.packed`, in little time.

    Args:
        prepared: the parameters' records.
        batch: the parameters and their gradients, all contiguous.
        moved: where the step takes their moments, without repetitions.
        which: of these, one number for each parameter.
    """
    records, owner = prepared.records.copy(), prepared.owner
    addresses = zip(("param", "grad"), prepared.offsets, batch.tensors, strict=True)
    for name, offsets, tensors in addresses:
        assert tensors["contiguous"].all()
        records[name] = offsets + tensors["data"][owner]
    steps = np.array([one.step for one in moved], np.int64)
    if len(moved) > 1:
        number = np.fromiter(which, np.intp, len(which))[owner]
        steps, records["scalars"] = steps[number], number
    records["moment_phase"], records["param_phase"] = dither.phase_of(prepared.keys, steps)
    return records, kernel.packed_scalars(one.scalars for one in moved)
