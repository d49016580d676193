# SPDX-License-Identifier: Apache-2.0
"""Counts of blocks that steps have left unchanged because a number was not finite."""

from collections.abc import Sequence

from zero8.op.devices import BlockCounts

Counts = tuple[Sequence[str], BlockCounts]
"""Blocks that a kernel call has left unchanged: the label of each piece, and its number."""


class Ledger:
    """Counts not yet reported; a GPU's arrive asynchronously.

    Attributes:
        pending: those of each kernel call.
        reported: the number of blocks reported so far.
    """

    def __init__(self) -> None:
        """Start without counts."""
        self.pending: list[Counts] = []
        self.reported = 0

    def take(self, *, wait: bool = False) -> dict[str, int]:
        """Return and forget the blocks by label, of the counts that have arrived, or of all.

        Args:
            wait: whether to wait for all counts.
        """
        taken: dict[str, int] = {}
        waiting = []
        for labels, counts in self.pending:
            if not wait and not counts.have_arrived():
                waiting.append((labels, counts))
                continue
            numbers = counts.read()
            for place in numbers.nonzero()[0].tolist():
                taken[labels[place]] = taken.get(labels[place], 0) + int(numbers[place])
        self.pending = waiting
        return taken
