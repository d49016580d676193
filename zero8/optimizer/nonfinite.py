# SPDX-License-Identifier: Apache-2.0
"""Counts of blocks that steps have left unchanged because a number was not finite."""

import logging
from collections.abc import Mapping, Sequence

from zero8.environment import ranks
from zero8.op.kernel import BlockCounts

logger = logging.getLogger("zero8")

Counts = tuple[Sequence[str], BlockCounts]
"""Blocks that a kernel call has left unchanged: the label of each piece, and its number."""


class Ledger:
    """Counts not yet reported (`pending`), and the number of blocks reported so far.

    Those of a GPU arrive asynchronously.
    """

    def __init__(self) -> None:
        """Start without counts."""
        self.pending: list[Counts] = []
        self.reported = 0

    def take(self, *, wait: bool = False) -> dict[str, int]:
        """Return and forget the blocks by label, of the counts that have arrived, or of all."""
        taken: dict[str, int] = {}
        waiting = []
        for labels, counts in self.pending:
            if not wait and not counts.have_arrived():
                waiting.append((labels, counts))
                continue
            blocks = counts.read()
            for place in blocks.nonzero()[0].tolist():
                taken[labels[place]] = taken.get(labels[place], 0) + int(blocks[place])
        self.pending = waiting
        return taken

    def log(self, skipped: Mapping[str, int]) -> None:
        """Log what `take` has returned."""
        self.reported += sum(skipped.values())
        for label, count in skipped.items():
            logger.warning(
                "non-finite gradient or moment: %s: %d blocks left unchanged", label, count
            )

    def raise_for(self, skipped: Mapping[str, int]) -> None:
        """Raise FloatingPointError for what `take` has returned."""
        self.reported += sum(skipped.values())
        worst = sorted(skipped.items(), key=lambda item: -item[1])[:10]
        raise FloatingPointError(
            f"non-finite gradient or moment in {len(skipped)} parameter(s): "
            + ", ".join(f"{label} ({count} blocks)" for label, count in worst)
            + "; these blocks were left unchanged, all others have stepped.  To go on training, "
            "catch this error; to find the cause, run a backward in torch.autograd.detect_anomaly()"
        )

    def check(self, groups: Sequence[ranks.Group]) -> None:
        """Raise FloatingPointError on all ranks of groups if there are blocks on any of them."""
        if count := ranks.total(self.reported, groups):
            raise FloatingPointError(
                f"{count} blocks met a non-finite gradient or moment so far (all ranks); they "
                "were left unchanged"
            )
