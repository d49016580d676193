# SPDX-License-Identifier: Apache-2.0
"""Counts of blocks that steps have left as they were, because a number was not finite."""

from collections.abc import Sequence

from zero8.op.devices import BlockCounts


class Ledger:
    """Counts not yet reported; a GPU's arrive asynchronously.

    Attributes:
        pending: by step, what the parameters of its pieces are called, and their counts.
        reported: how many blocks have been reported.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.pending: list[tuple[Sequence[str], BlockCounts]] = []
        self.reported = 0

    def add(self, labels: Sequence[str], counts: BlockCounts) -> None:
        """Note the counts of a step, and what the parameters of its pieces are called."""
        self.pending.append((labels, counts))

    def take(self, *, wait: bool = False) -> dict[str, int]:
        """Return the blocks by label, and forget them: those that are there, or, waiting, all."""
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
