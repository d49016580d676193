# SPDX-License-Identifier: Apache-2.0
"""Replay: many optimizers on the gradients of one run."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.fidelity.metrics import Tally, update_bounds
from benchmarks.fidelity.schemes import Scheme, Shadow, torch_adamw, usable
from benchmarks.fidelity.training import Gradients, Recipe, TrainingRun, adamw

# The stored v is looked at this often in the second half of a run.
SECOND_MOMENT_SAMPLES = 10


@dataclass
class Entrant:
    """A scheme under measurement: its optimizer on shadow parameters, and what was seen of it."""

    scheme: Scheme
    shadow: Shadow
    tally: Tally

    def row(self, beta2: float) -> dict:
        """Return the scheme's row of the result."""
        return {
            "scheme": self.scheme.name,
            "block_size": self.scheme.block_size,
            "beta2": beta2,
            "bytes_per_param": self.shadow.bytes_per_param(),
            **self.tally.result(),
            "implementation": self.scheme.implementation,
            "note": self.scheme.note,
        }


def replay(
    recipe: Recipe, schemes: list[Scheme], on_step: Callable[[], None]
) -> tuple[list[dict], list[dict]]:
    """Feed the gradients of one fp32 run to all schemes at every step, and compare their updates.

    Every scheme keeps its states quantized for the whole run.  Errors and drift are those of the
    second half, the extremes those of the whole run.

    Returns:
        A row per scheme, and the schemes that cannot run here with the reason.
    """
    betas = recipe.betas
    schemes, skipped = usable(schemes, betas)
    run = TrainingRun(recipe)
    trainer = adamw(run.model, recipe)
    gradients = Gradients(run)
    layout = gradients.layout
    reference = Shadow(torch_adamw(torch.float32), layout, betas)
    entrants = [
        Entrant(s, Shadow(s, layout, betas), Tally(layout.numel, gradients.untrained))
        for s in schemes
    ]
    half = recipe.steps // 2
    sample_every = max(1, half // SECOND_MOMENT_SAMPLES)
    for step, bound in zip(range(recipe.steps), update_bounds(betas), strict=False):
        grad = gradients.next(step)
        expected = reference.update(grad)
        sampled = step >= half and (recipe.steps - 1 - step) % sample_every == 0
        for entrant in entrants:
            update = entrant.shadow.update(grad)
            entrant.tally.watch(update, bound)
            if step >= half:
                entrant.tally.compare(update, expected)
            if sampled:
                stored = entrant.shadow.second_moments()
                entrant.tally.compare_second_moments(stored, reference.second_moments())
        run.update(trainer, step)
        on_step()
    rows = [entrant.row(recipe.beta2) for entrant in entrants]
    return rows, [{**entry, "beta2": recipe.beta2} for entry in skipped]
