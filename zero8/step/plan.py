# SPDX-License-Identifier: Apache-2.0
"""The plan of a step: how its parameters are divided among kernel calls; kept between steps."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from zero8.op import kernel
from zero8.op.describe import Snapshot
from zero8.spec.algorithm import Algorithm
from zero8.state.header import Entries
from zero8.state.kind import RecordKey, StateKind
from zero8.state.weights import int8_rows
from zero8.step import int8_part
from zero8.step.batch import Batch
from zero8.step.matrix_part import MatrixPart
from zero8.step.part import Part
from zero8.step.records import ParamRecords
from zero8.step.turns import extents_of, turns_of


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

    def contents(self, batch: Batch) -> RecordKey:
        """Return what records depend on besides the values and gradients of a batch.

        Of states of all kinds that is `StateKind.contents`; of INT8 weights it is their scales.
        """
        description, entries = self._contents_of(batch.states)
        pairs = zip(batch.params, batch.values, strict=True)
        wrapped = [int8_rows(p) for p, values in pairs if values is not p]  # most are p itself
        scales = [rows.scales for rows in wrapped if rows is not None]
        return description, [*entries, *scales] if scales else entries

    def _contents_of(self, states: Sequence[Entries]) -> RecordKey:
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


@dataclass(frozen=True, eq=False)
class Plan:
    """The parts of a step over certain parameters.

    Attributes:
        ids: the `id` of each parameter.
        kinds: the kinds of their states.
        snapshot: the tensors that the plan was made for; it is valid while they match.
        extents: the bytes that each parameter spans.
        turns: the turn of each (`zero8.step.turns`).
        parts: the kernel calls, in order.
        is_on_gpus: whether any part is on a GPU.
    """

    ids: list[int]
    kinds: Kinds
    snapshot: Snapshot
    extents: np.ndarray
    turns: np.ndarray
    parts: list[Part]
    is_on_gpus: bool

    def addresses_of(self, batch: Batch) -> np.ndarray | None:
        """Return the addresses of a batch of the same parameters, None if the plan is stale."""
        contents = self.kinds.contents(batch)
        addresses = self.snapshot.addresses_if_same(batch.values, batch.grads, contents)
        if addresses is not None and (addresses[0] != self.snapshot.addresses[0]).any():
            if (turns_of(addresses[0], self.extents) != self.turns).any():
                return None
            self.snapshot.addresses[0] = addresses[0]
        return addresses

    @classmethod
    def of(
        cls,
        batch: Batch,
        snapshot: Snapshot,
        kinds: Kinds,
        records: Sequence[ParamRecords],
    ) -> "Plan":
        """Return the plan for a batch.

        The contiguous parameters of one device and algorithm form a part; INT8 weights another,
        where no kernel takes them; those that share memory with earlier ones further parts.
        A parameter that is in the batch twice, as tied weights may be, is in one part, once.
        Blocks are defined in the logical order of the elements: a parameter in another layout, such
        as channels_last, steps on a copy, in a part of its own.

        Args:
            batch: the parameters.
            snapshot: their tensors.
            kinds: the kinds of their states.
            records: their records.
        """
        in_order, devices = snapshot.contiguous[0], snapshot.devices
        numbers = np.array([one.kind.algorithm.number for one in records])
        is_widened = np.array(
            [v.dtype == torch.int8 and int8_part.is_widened(v.device) for v in batch.values]
        )
        ids, extents = list(map(id, batch.params)), extents_of(batch.values)
        turns = turns_of(snapshot.addresses[0], extents)
        is_first = np.zeros(len(ids), bool)
        is_first[np.unique(ids, return_index=True)[1]] = True
        keys = np.stack([turns, devices.astype(np.int64), numbers, is_widened])
        together = [
            np.flatnonzero(is_first & in_order & (keys == key).all(0))
            for key in np.unique(keys, axis=1).T[:, :, None]
        ]
        apart = [np.array([place]) for place in np.flatnonzero(is_first & ~in_order)]
        some = [places.tolist() for places in (*together, *apart) if len(places)]
        parts = []
        for places in sorted(some, key=lambda places: turns[places[0]]):
            is_contiguous = bool(snapshot.contiguous[:, places].all())
            mine = [records[place] for place in places]
            device = batch.values[places[0]].device
            is_all = len(places) == len(batch.params)
            algorithm = mine[0].kind.algorithm
            part = _part_class(algorithm, bool(is_widened[places[0]]))
            parts.append(part.joined(algorithm, places, is_all, is_contiguous, device, mine))
        is_on_gpus = not all(isinstance(part.kernel, kernel.CpuKernel) for part in parts)
        return cls(ids, kinds, snapshot, extents, turns, parts, is_on_gpus)


def _part_class(algorithm: Algorithm, is_widened: bool) -> type[Part]:
    if is_widened:
        return int8_part.Int8Part
    return MatrixPart if algorithm.is_of_matrices else Part
