# SPDX-License-Identifier: Apache-2.0
"""The plan of a step: how its parameters are divided among kernel calls; kept between steps."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from zero8.op import kernel
from zero8.op.describe import Snapshot
from zero8.op.devices import Kernel, Taken, kernel_on
from zero8.spec.algorithm import Algorithm, Scalars
from zero8.state.header import Entries
from zero8.state.kind import RecordKey, StateKind
from zero8.step.batch import Batch
from zero8.step.copies import set_copies
from zero8.step.records import ParamRecords


class Kinds:
    """The kinds of state of the parameters of a batch."""

    def __init__(self, kinds: Sequence[StateKind]):
        """Group the parameters by kind.

        Args:
            kinds: one per parameter.
        """
        self._places: dict[StateKind, list[int]] = {}
        for place, kind in enumerate(kinds):
            self._places.setdefault(kind, []).append(place)

    def contents(self, states: Sequence[Entries]) -> RecordKey:
        """Return the contents of the states of all kinds; see `StateKind.contents`."""
        if len(self._places) == 1:
            (kind,) = self._places
            return kind.contents(states)
        parts = [kind.contents(mine) for kind, mine in self._shares(states)]
        descriptions = [description for description, _ in parts]
        entries = [entry for _, entries in parts for entry in entries]
        return descriptions, entries

    def note_writes(self, states: Sequence[Entries]) -> None:
        """See `StateKind`."""
        if len(self._places) == 1:
            (kind,) = self._places
            kind.note_writes(states)
            return
        for kind, mine in self._shares(states):
            kind.note_writes(mine)

    def _shares(self, states: Sequence[Entries]) -> list[tuple[StateKind, list[Entries]]]:
        return [(kind, [states[at] for at in places]) for kind, places in self._places.items()]


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
    """The parameters of one kernel call.

    Attributes:
        algorithm: the algorithm of the step.
        places: the parameters' indices in the batch.
        is_all: whether these are all parameters of the batch.
        is_contiguous: whether parameters and gradients are contiguous; else copies are stepped.
        device: the device of the parameters.
        labels: the parameter's label, for each piece.
        records: (pieces,) `SEGMENT`.
        kept: (pieces,) `KEPT_PIECE`.
        kernel: the kernel of the device.
        taken: the last step, None before the first.
    """

    algorithm: Algorithm
    places: list[int]
    is_all: bool
    is_contiguous: bool
    device: torch.device
    labels: tuple[str, ...]
    records: np.ndarray
    kept: np.ndarray
    kernel: Kernel
    taken: Taken | None = None
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
            tuple(chain.from_iterable(one.labels for one in records)),
            np.concatenate([one.records for one in records]),
            kept,
            kernel_on(device),
        )

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
    ) -> Taken:
        """Take the step of this part of a batch, and return it, also as `taken`.

        `copies`, by parameter, are taken out where the step has written them.
        """
        mine = self.of(batch)
        # Autograd does not see writes by the kernel.
        torch.autograd.graph.increment_version(mine.values)
        if self.is_contiguous:
            written = self._set_copies(mine, copies)
            self.taken = self.kernel.step(*self.filled(None, addresses, steps, which))
            for p in written:
                del copies[p]
            return self.taken
        contiguous = mine.contiguous()
        self.taken = self.kernel.step(*self.filled(contiguous, addresses, steps, which))
        contiguous.copy_to(mine)
        return self.taken

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


@dataclass(frozen=True, eq=False)
class Plan:
    """The parts of a step over certain parameters.

    Attributes:
        ids: the `id` of each parameter.
        kinds: the kinds of their states.
        snapshot: the tensors that the plan was made for; it is valid while they match.
        parts: the kernel calls, in order.
        is_on_gpus: whether any part is on a GPU.
    """

    ids: list[int]
    kinds: Kinds
    snapshot: Snapshot
    parts: list[Part]
    is_on_gpus: bool

    def addresses_of(self, batch: Batch) -> np.ndarray | None:
        """Return the addresses of a batch of the same parameters, None if the plan is stale."""
        contents = self.kinds.contents(batch.states)
        return self.snapshot.addresses_if_same(batch.values, batch.grads, contents)

    @classmethod
    def of(
        cls,
        algorithm: Algorithm,
        batch: Batch,
        snapshot: Snapshot,
        kinds: Kinds,
        records: Sequence[ParamRecords],
    ) -> "Plan":
        """Return the plan for a batch.

        The contiguous parameters of one device form a part.  Blocks are defined in the logical
        order of the elements: a parameter in another layout, such as channels_last, steps on a
        copy, in a part of its own.

        Args:
            algorithm: the algorithm of the step.
            batch: the parameters.
            snapshot: their tensors.
            kinds: the kinds of their states.
            records: their records.
        """
        in_order, devices = snapshot.contiguous[0], snapshot.devices
        together = [np.flatnonzero(in_order & (devices == one)) for one in np.unique(devices)]
        apart = [np.array([place]) for place in np.flatnonzero(~in_order)]
        parts = []
        for places in (list(map(int, places)) for places in (*together, *apart)):
            if places:
                is_contiguous = bool(snapshot.contiguous[:, places].all())
                mine = [records[place] for place in places]
                device = batch.values[places[0]].device
                is_all = len(places) == len(batch.params)
                parts.append(Part.joined(algorithm, places, is_all, is_contiguous, device, mine))
        is_on_gpus = not all(isinstance(part.kernel, kernel.CpuKernel) for part in parts)
        return cls(list(map(id, batch.params)), kinds, snapshot, parts, is_on_gpus)
