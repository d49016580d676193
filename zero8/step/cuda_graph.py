# SPDX-License-Identifier: Apache-2.0
"""Steps that are captured in a CUDA graph."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from zero8.op.cuda import CudaKernel, Launched
from zero8.op.devices import BlockCounts
from zero8.op.launch import Launch
from zero8.step.batch import Batch
from zero8.step.part import NextStep, Part
from zero8.step.plan import Plan

TOO_EARLY = (
    "CUDA graph: a captured step needs states and a compiled kernel; call step() once before "
    "capturing it"
)


@dataclass
class CapturedPart:
    """The graph's launch for one part of the plan.

    Attributes:
        part: the part, on a GPU.
        contiguous: the copies that the kernel steps over, made by the graph; None if it needs none.
        launched: the captured launch; replays read its table.
        stream: the stream of the last write to its table.
    """

    part: Part
    contiguous: Batch | None
    launched: Launched
    stream: torch.cuda.Stream | None = None

    @classmethod
    def of(cls, part: Part, batch: Batch) -> "CapturedPart":
        """Capture a launch like that of the last step."""
        taken = part.taken
        assert isinstance(taken, Launched), "the step of a part on a GPU has been taken"
        if part.is_contiguous:
            return cls(part, None, _kernel_of(part).capture(taken))
        mine = part.of(batch)
        contiguous = mine.contiguous()
        launched = _kernel_of(part).capture(taken)
        contiguous.copy_to(mine)
        return cls(part, contiguous, launched)

    def refresh(self, launch: Launch) -> None:
        """Make the next replay do this launch, behind the work of torch's current stream."""
        _kernel_of(self.part).refresh(launch, self.launched)
        self.stream = torch.cuda.current_stream(self.launched.table.device)

    def counts(self) -> BlockCounts:
        """Return the counts of the last replay."""
        with torch.cuda.stream(self.stream):
            return self.launched.counts()


class CapturedStep:
    """The step over a batch that replays of the graph take; keeps the batch alive.

    Attributes:
        batch: the parameters and their gradients.
        is_refreshed: whether a replay was prepared whose counts have not been requested.
    """

    def __init__(self, batch: Batch, plan: Plan, addresses: np.ndarray):
        """Capture a step; an ordinary step with the same plan must have been taken.

        Raises:
            RuntimeError: if none has.
        """
        self.batch, self.is_refreshed = batch, False
        self._plan, self._addresses = plan, addresses
        if several := [part.several_calls for part in plan.parts if part.several_calls]:
            raise RuntimeError(
                f"CUDA graph: got a step of {several[0]}, which is several kernel calls; capture "
                "the forward and the backward only, and call step() after a replay"
            )
        if any(part.taken is None for part in plan.parts):
            raise RuntimeError(TOO_EARLY)
        self._parts = [CapturedPart.of(part, batch) for part in plan.parts]

    def check_is_at(self, batch: Batch) -> None:
        """Raise RuntimeError unless the graph would step over the memory of this batch."""
        addresses = self._plan.addresses_of(batch)
        if addresses is None or not np.array_equal(addresses, self._addresses):
            raise RuntimeError(
                "before_replay: parameters or states have moved since the CUDA graph was captured "
                "(was a checkpoint loaded?); capture it again"
            )
        self._plan.kinds.note_writes(batch.states)

    def launches(self, steps: Sequence[NextStep], which: Sequence[int]) -> list[Launch]:
        """Return the launches that take a step; see `Part.filled` for the arguments.

        Raises:
            RuntimeError: if the step has more distinct scalars than the captured one.
        """
        launches = []
        for one in self._parts:
            filled = one.part.filled(one.contiguous, self._addresses, steps, which)
            launches.append(Launch.of(*filled))
            if launches[-1].table.size > one.launched.table.numel():
                raise RuntimeError(
                    "CUDA graph: parameters now need more distinct settings than were captured; "
                    "step once and capture again"
                )
        return launches

    def refresh(self, launches: Sequence[Launch]) -> None:
        """Make the next replay do these launches, behind the work of torch's current stream."""
        for one, launch in zip(self._parts, launches, strict=True):
            one.refresh(launch)
        self.is_refreshed = True

    def take_counts(self) -> Iterator[tuple[Sequence[str], BlockCounts]]:
        """Yield labels and counts of the last replay, unless they have been requested before."""
        if self.is_refreshed:
            self.is_refreshed = False
            for one in self._parts:
                yield one.part.labels, one.counts()


def _kernel_of(part: Part) -> CudaKernel:
    assert isinstance(part.kernel, CudaKernel), "CUDA graphs capture parts on a GPU only"
    return part.kernel
