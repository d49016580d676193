# SPDX-License-Identifier: Apache-2.0
"""The gradients of one fp32 run, and zero8's optimizers of one moment to feed them to."""

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from benchmarks.fidelity.schemes import Named, Scheme, zero8_states
from benchmarks.fidelity.training import Gradients, Layout, Recipe, TrainingRun, adamw
from zero8.optimizer import Lion8bitBlockwise, SGD8bitBlockwise


class Comparison(Protocol):
    """Optimizers in several states that are compared."""

    def take(self, grad: Tensor, counts: bool) -> None:
        """Take a step with all of them on a flat gradient; compare them if the step counts."""


AnyComparison = TypeVar("AnyComparison", bound=Comparison)


def replay(
    recipe: Recipe, make: Callable[[Layout], list[AnyComparison]], on_step: Callable[[], None]
) -> list[AnyComparison]:
    """Feed the gradients of a run with fp32 AdamW to comparisons; the second half counts."""
    run = TrainingRun(recipe)
    trainer = adamw(run.model, recipe)
    gradients = Gradients(run)
    comparisons = make(gradients.layout)
    for step in range(recipe.steps):
        grad = gradients.next(step)
        for comparison in comparisons:
            comparison.take(grad, step >= recipe.steps // 2)
        run.update(trainer, step)
        on_step()
    return comparisons


def sgd(states: str, nesterov: bool = False) -> Scheme:
    """Return SGD whose momentum is beta1, without dampening.

    Its update is the moving average of the gradients over 1 - beta1, or what Nesterov's momentum
    makes of that average; relative errors are the average's.
    """

    def make(named: Named, betas: tuple[float, float]) -> Optimizer:
        options = {"momentum": betas[0], "nesterov": nesterov, **zero8_states(states)}
        return SGD8bitBlockwise(named, lr=1.0, **options)

    return Scheme(states, make, None, 256, "zero8")


def lion(states: str) -> Scheme:
    """Return Lion, whose update at lr 1 is the sign of its direction."""

    def make(named: Named, betas: tuple[float, float]) -> Optimizer:
        return Lion8bitBlockwise(named, lr=1.0, betas=betas, **zero8_states(states))

    return Scheme(states, make, None, 256, "zero8")
