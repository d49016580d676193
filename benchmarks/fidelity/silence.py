# SPDX-License-Identifier: Apache-2.0
"""What becomes of weights whose gradient ends while that of others in their block goes on.

Exact moments decay to zero and the weight comes to rest.  A rounded m whose decay is less than half
a code stays where it is, while v goes on to decay: u = m/sqrt(v) then grows up to its bound.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.fidelity.pool import Job
from benchmarks.fidelity.schemes import Shadow, deepspeed_bf16, torch_adamw, zero8_scheme
from benchmarks.fidelity.states import BETA2S
from benchmarks.fidelity.training import BETA1, Layout
from zero8.spec.codec import CODECS

LAYOUT = Layout(("weight",), ((64, 256),))
# Every other column falls silent after so many steps.
LOUD_STEPS = 100


def gradients(step: int) -> Tensor:
    """Return the flat gradients of a step, counted from 0: normal numbers."""
    grad = torch.randn(LAYOUT.shapes[0], generator=torch.Generator().manual_seed(step))
    if step >= LOUD_STEPS:
        grad[:, ::2] = 0.0
    return grad.flatten()


def silence(beta2: float, steps: int, on_step: Callable[[], None]) -> list[dict]:
    """Return, per scheme, how far the silent weights go in so many silent steps, at lr 1."""
    schemes = [torch_adamw(torch.float32), *map(zero8_scheme, CODECS), deepspeed_bf16()]
    shadows = {scheme.name: Shadow(scheme, LAYOUT, (BETA1, beta2)) for scheme in schemes}
    way, last = ({name: torch.zeros(LAYOUT.numel // 2) for name in shadows} for _ in "12")
    for step in range(LOUD_STEPS + steps):
        grad = gradients(step)
        for name, shadow in shadows.items():
            last[name] = shadow.update(grad)[::2]
            if step >= LOUD_STEPS:
                way[name] += last[name]
        on_step()
    return [
        {
            "scheme": name,
            "beta2": beta2,
            "silent_steps": steps,
            "way": way[name].abs().mean().item(),
            "way_over_fp32": (way[name].abs().mean() / way["torch_fp32"].abs().mean()).item(),
            "last_abs_u": last[name].abs().mean().item(),
        }
        for name in shadows
    ]


@dataclass(frozen=True)
class Silence:
    """The measurement: `steps` silent steps for every beta2."""

    steps: int

    def jobs(self) -> list[Job]:
        """Return a job per beta2."""
        steps = LOUD_STEPS + self.steps
        return [Job(silence, (beta2, self.steps), steps) for beta2 in BETA2S]

    def result(self, results: dict[Job, Any]) -> dict:
        """Return the rows of all jobs."""
        return {"silence": [row for job in self.jobs() for row in results[job]]}
