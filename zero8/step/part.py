# SPDX-License-Identifier: Apache-2.0
"""A part of a step, which one kernel call takes, or several do; kept between steps."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from zero8.op import kernel
from zero8.op.devices import Kernel, kernel_on
from zero8.spec.algorithm import Algorithm, Scalars
from zero8.state.header import Entries
from zero8.state.table import Piece
from zero8.state.weights import class_in_torchao
from zero8.step.batch import Batch
from zero8.step.copies import set_copies
from zero8.step.nonfinite import Counts
from zero8.step.records import ParamRecords


class NextStep(NamedTuple):
    """The step that parameters with equal settings and counters take.

    Attributes:
        step: its number, from 1.
        entries: the entries of states after it: the step and the remembered numbers.
        scalars: its scalars.
    """

    step: int
    entries: Entries
    scalars: Scalars


@dataclass(eq=False)
class Part:
    """Parameters of one device and algorithm that step together, in one kernel call.

    Attributes:
        algorithm: the algorithm of the step.
        places: the parameters' indices in the batch.
        is_all: whether these are all parameters of the batch.
        is_contiguous: whether parameters and gradients are contiguous; else copies are stepped.
        device: the device of the parameters.
        owners: the records of each of the parameters.
        records: (pieces,) `SEGMENT`.
        kept: (pieces,) `KEPT_PIECE`.
        kernel: the kernel of the device.
    """

    algorithm: Algorithm
    places: list[int]
    is_all: bool
    is_contiguous: bool
    device: torch.device
    owners: list[ParamRecords]
    records: np.ndarray
    kept: np.ndarray
    kernel: Kernel
    has_copies: bool = False

    @classmethod
    def joined(
        cls,
        algorithm: Algorithm,
        places: list[int],
        is_all: bool,
        is_contiguous: bool,
        device: torch.device,
        records: Sequence[ParamRecords],
    ) -> "Part":
        """Return the part with the records of its parameters, which are joined."""
        kept = np.concatenate([one.kept for one in records])
        kept["owner"] = np.repeat(np.arange(len(records)), [len(one.records) for one in records])
        return cls(
            algorithm,
            places,
            is_all,
            is_contiguous,
            device,
            list(records),
            np.concatenate([one.records for one in records]),
            kept,
            kernel_on(device, (algorithm, records[0].kind.settings.codec)),
        )

    @cached_property
    def pieces(self) -> list[Piece]:
        """The piece of each record."""
        return list(chain.from_iterable(one.pieces for one in self.owners))

    @property
    def labels(self) -> tuple[str, ...]:
        """The label of the parameter of each record."""
        return tuple(piece.name for piece in self.pieces)

    def of(self, batch: Batch) -> Batch:
        """Return this part's parameters of a batch."""
        return batch if self.is_all else batch.at(self.places)

    def filled(
        self,
        contiguous: Batch | None,
        addresses: np.ndarray,
        steps: Sequence[NextStep],
        which: Sequence[int],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the kernel's structs of a step, as `kernel.packed` does; valid until the next.

        Args:
            contiguous: copies to step over, None where `is_contiguous`.
            addresses: (2, parameters) uint64, of the batch's parameters and gradients.
            steps: the distinct steps of the batch's parameters.
            which: for each parameter of the batch, the index of its step in `steps`.
        """
        if contiguous is not None:
            addresses = contiguous.addresses()
        elif not self.is_all:
            addresses = addresses[:, self.places]
        if not self.is_all:
            which = [which[place] for place in self.places]
        numbers = np.array([one.step for one in steps], np.int64)
        kernel.fill(self.records, self.kept, addresses, np.array(which, np.int64), numbers)
        scalars = kernel.packed_scalars(self.algorithm, [one.scalars for one in steps])
        return self.records, scalars

    def step(
        self,
        batch: Batch,
        addresses: np.ndarray,
        steps: Sequence[NextStep],
        which: Sequence[int],
        copies: MutableMapping[Tensor, Tensor],
    ) -> list[Counts]:
        """Take the step of this part of a batch; return the counts that may not be 0.

        `copies`, by parameter, are taken out where the step has written them.
        """
        mine = self.of(batch)
        self.note_writes(mine)
        if self.is_contiguous:
            written = self._set_copies(mine, copies)
            counts = self._take(mine, *self.filled(None, addresses, steps, which))
            for p in written:
                del copies[p]
            return counts
        contiguous = mine.contiguous()
        counts = self._take(contiguous, *self.filled(contiguous, addresses, steps, which))
        contiguous.copy_to(mine)
        return counts

    def note_writes(self, mine: Batch) -> None:
        """Tell autograd, which does not see them, of the kernel's writes to these parameters."""
        pairs = zip(mine.params, mine.values, strict=True)
        wrappers = [p for p, values in pairs if p is not values and class_in_torchao(p)]
        torch.autograd.graph.increment_version([*mine.values, *wrappers])

    def _take(self, mine: Batch, records: np.ndarray, scalars: np.ndarray) -> list[Counts]:
        """Take the step over these parameters, whose records and scalars are filled."""
        counts = self.kernel.step(records, scalars)
        return [] if counts is None else [(self.labels, counts)]

    def _set_copies(self, mine: Batch, copies: Mapping[Tensor, Tensor]) -> list[Tensor]:
        if self.device.type != "cpu" or not (copies or self.has_copies):
            return []
        written = set_copies(self.records, self.kept, mine.params, copies)
        self.has_copies = bool(written)
        return written

    def note(
        self, states: Sequence[Entries], steps: Sequence[NextStep], which: Sequence[int]
    ) -> None:
        """Write the entries of a step that was taken into the states of the batch."""
        if self.is_all and len(steps) == 1:
            (step,) = steps
            for state in states:
                state.update(step.entries)
            return
        for place in self.places:
            states[place].update(steps[which[place]].entries)
