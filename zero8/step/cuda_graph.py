# SPDX-License-Identifier: Apache-2.0
"""A step over parameters that has become a part of a CUDA graph."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from zero8.op.launch import Launch
from zero8.step.cache import Batch, Moved, Prepared, packed
from zero8.step.runners import BlockCounts, CudaRun, CudaRunner


@dataclass
class CapturedStep:
    """What replays of the graph step over; it is kept alive with this.

    Attributes:
        batch: the parameters and their gradients.
        contiguous: what the kernel steps over, copies where elements lie in another order.
        prepared: their records.
        runner: who captured.
        run: what has been captured.
        is_refreshed: whether a replay has been prepared and its counts have not been asked for.
    """

    batch: Batch
    contiguous: Batch
    prepared: Prepared
    runner: CudaRunner
    run: CudaRun
    is_refreshed: bool = False

    @classmethod
    def of(cls, batch: Batch, prepared: Prepared, runner: CudaRunner) -> "CapturedStep":
        """Capture a step over a batch, for whose records an ordinary step has been taken."""
        contiguous = batch.contiguous()
        run = runner.capture(prepared.last)
        contiguous.copy_to(batch)
        return cls(batch, contiguous, prepared, runner, run)

    def has_moved(self, batch: Batch, premises: tuple | None) -> bool:
        """Return whether the graph would step over other memory than this batch has."""
        was, now = (b.tensors[0]["data"] for b in (self.batch, batch))
        return premises != self.prepared.premises or not np.array_equal(was, now)

    def next_launch(self, moved: Sequence[Moved], which: Sequence[int]) -> Launch:
        """Return the launch that takes a step; see `zero8.step.cache.packed` for the arguments.

        Raises:
            RuntimeError: if it has more scalars than the step that was captured.
        """
        launch = Launch.of(*packed(self.prepared, self.contiguous, moved, which))
        if launch.table.size > self.run.launched.table.numel():
            raise RuntimeError(
                "CUDA graph: parameters now need more distinct settings than were captured; step "
                "once and capture again"
            )
        return launch

    def refresh(self, launch: Launch) -> None:
        """Make the next replay do this, behind the work of torch's current stream."""
        self.runner.refresh(launch, self.run)
        self.is_refreshed = True

    def take_counts(self) -> BlockCounts | None:
        """Return the counts of the last replay, None if they have been asked for before."""
        if not self.is_refreshed:
            return None
        self.is_refreshed = False
        return self.run.counts()
