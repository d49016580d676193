# SPDX-License-Identifier: Apache-2.0
"""Counts of blocks that steps have left unchanged because a number was not finite."""

from collections.abc import Sequence

from zero8.op.devices import BlockCounts


class Ledger:
    """Counts not yet reported; a GPU's arrive asynchronously.

    Attributes:
        pending: for each kernel call, the labels of its pieces and their counts.
        reported: the number of blocks reported so far.
    """

    def __init__(self) -> None:
        """Start without counts."""
        self.pending: list[tuple[Sequence[str], BlockCounts]] = []
        self.reported = 0

    def add(self, labels: Sequence[str], counts: BlockCounts) -> None:
        """Note the counts of a kernel call, with the label of each piece."""
        self.pending.append((labels, counts))

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
