# SPDX-License-Identifier: Apache-2.0
"""Kernel records that are kept between steps.

Making them takes about 100 microseconds per parameter, much compared with the step of a small
tensor.  They hold addresses, never tensors, so they keep nothing alive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from torch import Tensor

from zero8.op import kernel
from zero8.spec import dither
from zero8.spec.scalars import StepScalars
from zero8.spec.segment import Segment
from zero8.state.kind import StateKind


class NextStep(NamedTuple):
    """The step that parameters with equal settings take: its number, history and scalars.

    Attributes:
        step: its number, from 1.
        history: bound on m^2/v after it.
        scalars: what the equations take from both and from the group's settings.
    """

    step: int
    history: float
    scalars: StepScalars


@dataclass(frozen=True, eq=False)
class ParamRecords:
    """The records of one parameter, and what they depend on.

    Attributes:
        kind: the kind of its state.
        fingerprint: `Seen.fingerprint` when they were made; they fit where it is the same.
        records: (pieces,) `kernel.SEGMENT`; `StepRecords` says what changes from step to step.
        offsets: (2, pieces) uint64, in bytes from the address of the parameter, and of the
            gradient, to the piece.
        keys: (2, pieces) int64, of the dithers of the second moment and of the parameter.
        labels: what the parameter of each piece is called.
    """

    kind: StateKind
    fingerprint: tuple | None
    records: np.ndarray
    offsets: np.ndarray
    keys: np.ndarray
    labels: tuple[str, ...]

    @classmethod
    def of(
        cls,
        kind: StateKind,
        fingerprint: tuple | None,
        labels: tuple[str, ...],
        flat: tuple[Tensor, Tensor],
        segments: Sequence[Segment],
        keys: Sequence[tuple[int, int]],
    ) -> "ParamRecords":
        """Return the records of one parameter.

        Args:
            kind: as the attribute.
            fingerprint: as the attribute.
            labels: as the attribute.
            flat: the parameter and its gradient, or copies, in one dimension.
            segments: its pieces, which lie in these two and in the live state.
            keys: of each segment, the keys of its two dithers.
        """
        records, _ = kernel.packed(segments, flat[0].device)
        pairs = zip(("param", "grad"), flat, strict=True)
        offsets = np.stack([records[name] - np.uint64(t.data_ptr()) for name, t in pairs])
        columns = np.array(keys, np.int64).reshape(-1, 2).T
        return cls(kind, fingerprint, records, offsets, columns, labels)


class StepRecords:
    """The records of parameters that step together, in order.

    Attributes:
        labels: what the parameter of each piece is called.
    """

    def __init__(self, parts: Sequence[ParamRecords]):
        """Join the records of parameters."""
        self.labels = tuple(chain.from_iterable(part.labels for part in parts))
        self._records = np.concatenate([part.records for part in parts])
        self._offsets = np.concatenate([part.offsets for part in parts], axis=1)
        self._keys = np.concatenate([part.keys for part in parts], axis=1)
        # Which of the parameters each piece belongs to.
        self._owner = np.repeat(np.arange(len(parts)), [len(part.records) for part in parts])
        self._addresses = b""  # that the records hold now

    def filled(
        self, addresses: np.ndarray, steps: Sequence[NextStep], which: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the kernel's structs of a step, as `kernel.packed` does; valid until the next.

        Args:
            addresses: (2, parameters) uint64, of parameters and gradients.
            steps: the steps that the parameters take, without repetitions.
            which: of these, one number for each parameter.
        """
        records = self._records
        if addresses.tobytes() != self._addresses:
            records["param"], records["grad"] = self._offsets + addresses[:, self._owner]
            self._addresses = addresses.tobytes()
        numbers: int | np.ndarray = steps[0].step
        records["scalars"] = 0
        if len(steps) > 1:
            records["scalars"] = place = np.array(which, np.intp)[self._owner]
            numbers = np.array([one.step for one in steps], np.int64)[place]
        records["moment_phase"], records["param_phase"] = dither.phase_of(self._keys, numbers)
        records["nonfinite_blocks"] = 0
        return records, kernel.packed_scalars(one.scalars for one in steps)
