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
from zero8.op.structs import KEPT_PIECE
from zero8.spec.algorithm import Algorithm, Scalars
from zero8.spec.segment import Segment
from zero8.state.header import Entries
from zero8.state.kind import StateKind
from zero8.step.batch import Seen


class NextStep(NamedTuple):
    """The step that parameters with equal settings take.

    Attributes:
        step: its number, from 1.
        entries: what states note of it: the number, and what the algorithm remembers.
        scalars: what the equations take from both and from the group's settings.
    """

    step: int
    entries: Entries
    scalars: Scalars


@dataclass(frozen=True, eq=False)
class ParamRecords:
    """The records of one parameter, and what they depend on.

    Attributes:
        kind: the kind of its state.
        seen: what they were made from; they fit where that is so again.
        records: (pieces,) `kernel.SEGMENT`; `StepRecords` says what changes from step to step.
        kept: (pieces,) `KEPT_PIECE`, what does not change.
        labels: what the parameter of each piece is called.
    """

    kind: StateKind
    seen: Seen
    records: np.ndarray
    kept: np.ndarray
    labels: tuple[str, ...]

    @classmethod
    def of(
        cls,
        kind: StateKind,
        seen: Seen,
        labels: tuple[str, ...],
        flat: tuple[Tensor, Tensor],
        segments: Sequence[Segment],
        keys: Sequence[tuple[list[int], int]],
    ) -> "ParamRecords":
        """Return the records of one parameter.

        Args:
            kind: as the attribute.
            seen: as the attribute.
            labels: as the attribute.
            flat: the parameter and its gradient, or copies, in one dimension.
            segments: its pieces, which lie in these two and in the live state.
            keys: of each segment, those of the dithers of its moments and of the parameter.
        """
        records = kernel.records_of(segments, flat[0].device, {})
        kept = np.zeros(len(records), KEPT_PIECE)
        for name, tensor in zip(("param", "grad"), flat, strict=True):
            kept[f"{name}_offset"] = records[name] - np.uint64(tensor.data_ptr())
        for one, (moment_keys, param_key) in zip(kept, keys, strict=True):
            one["moment_keys"][: len(moment_keys)] = moment_keys
            one["param_key"] = param_key
        return cls(kind, seen, records, kept, labels)


class StepRecords:
    """The records of parameters that step together, in order.

    Attributes:
        labels: what the parameter of each piece is called.
    """

    def __init__(self, algorithm: Algorithm, parts: Sequence[ParamRecords]):
        """Join the records of parameters, which step by one algorithm."""
        self._algorithm = algorithm
        self.labels = tuple(chain.from_iterable(part.labels for part in parts))
        self._records = np.concatenate([part.records for part in parts])
        self._kept = np.concatenate([part.kept for part in parts])
        counts = [len(part.records) for part in parts]
        self._kept["owner"] = np.repeat(np.arange(len(parts)), counts)

    def filled(
        self, addresses: np.ndarray, steps: Sequence[NextStep], which: Sequence[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the kernel's structs of a step, as `kernel.packed` does; valid until the next.

        Args:
            addresses: (2, parameters) uint64, of parameters and gradients.
            steps: the steps that the parameters take, without repetitions.
            which: of these, one number for each parameter.
        """
        numbers = np.array([one.step for one in steps], np.int64)
        kernel.fill(self._records, self._kept, addresses, np.array(which, np.int64), numbers)
        scalars = kernel.packed_scalars(self._algorithm, (one.scalars for one in steps))
        return self._records, scalars
