# SPDX-License-Identifier: Apache-2.0
"""A step that several kernel calls take, and its counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zero8.op.devices import BlockCounts, Taken

Places = list[int]
"""Numbers of records of a part."""


@dataclass(frozen=True)
class StepInParts:
    """A step that several kernel calls have taken, each some of the records.

    Attributes:
        taken: the calls.
        places: the records of each.
        num_records: the number of all records.
    """

    taken: Sequence[Taken]
    places: Sequence[Places]
    num_records: int

    def counts(self) -> "CountsInParts | None":
        """Return the blocks left unchanged, None if it is known that there are none."""
        parts = [(at, t.counts()) for at, t in zip(self.places, self.taken, strict=True)]
        known = [(at, counts) for at, counts in parts if counts is not None]
        return CountsInParts(known, self.num_records) if known else None


@dataclass(frozen=True)
class CountsInParts:
    """The counts of several kernel calls, in the order of the part's records.

    Attributes:
        parts: the records of each call, and its counts.
        num_records: the number of all records.
    """

    parts: Sequence[tuple[Places, BlockCounts]]
    num_records: int

    def have_arrived(self) -> bool:
        """Return whether all counts have."""
        return all(counts.have_arrived() for _, counts in self.parts)

    def read(self) -> np.ndarray:
        """Return the counts of all records."""
        read = np.zeros(self.num_records, np.int64)
        for places, counts in self.parts:
            read[places] = counts.read()
        return read
