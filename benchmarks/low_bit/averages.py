# SPDX-License-Identifier: Apache-2.0
"""How far quantized averages of gradients are from exact ones, on the gradients of one run."""

from collections.abc import Callable

from benchmarks.fidelity.metrics import Errors
from benchmarks.fidelity.training import Recipe, TrainingRun, adamw
from benchmarks.low_bit.ranks import RankGradients
from benchmarks.low_bit.reduction import LARGEST_CODES, ROUNDINGS, average


def averages(recipe: Recipe, on_step: Callable[[], None]) -> list[dict]:
    """Return the errors in a run with fp32 AdamW on exact averages, a row per format and rounding.

    Errors are relative to the exact averages, over all elements; those of sums over steps are
    relative to the sums of exact averages.
    """
    run = TrainingRun(recipe)
    trainer, gradients = adamw(run.model, recipe), RankGradients(run)
    kinds = [(name, rounding) for name in LARGEST_CODES for rounding in ROUNDINGS]
    errors = {kind: Errors(gradients.numel) for kind in kinds}
    for step in range(recipe.steps):
        grads = gradients.next(step)
        exact = grads.mean(0)
        for kind in kinds:
            errors[kind].compare(average(grads, *kind, recipe.seed, step), exact)
        gradients.hand_over(exact)
        run.update(trainer, step)
        on_step()
    return [
        {
            "format": name,
            "rounding": rounding,
            "steps": recipe.steps,
            "rms_error": errors[name, rounding].rms,
            "rms_error_of_sums": errors[name, rounding].drift,
        }
        for name, rounding in kinds
    ]
