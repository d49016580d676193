# SPDX-License-Identifier: Apache-2.0
"""The learning rate over a run: linear warm-up, then half a cosine."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """DeepSpeed's WarmupCosineLR with linear warm-up, without DeepSpeed.

    Attributes:
        warmup_steps: until the full learning rate.
        min_ratio: of the learning rate at the end to the full one.
        total_steps: of the run.
    """

    warmup_steps: int
    min_ratio: float
    total_steps: int

    def ratio(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0, as a part of the full one."""
        # DeepSpeed's starts at 0 and counts from there after the first step: two steps have 0.
        done = max(0, step - 1)
        if done < self.warmup_steps:
            return done / self.warmup_steps
        decay_steps = max(1, self.total_steps - self.warmup_steps)
        progress = min(1.0, (done - self.warmup_steps + 1) / decay_steps)
        return self.min_ratio + (1 - self.min_ratio) * (1 + math.cos(math.pi * progress)) / 2
