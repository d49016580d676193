# SPDX-License-Identifier: Apache-2.0
"""One training run of a small model, a step at a time: the source of gradients and of losses."""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from benchmarks.fidelity.text import TextTask

BETA1 = 0.9


class Task(Protocol):
    """A model and its data."""

    def make_model(self) -> nn.Module:
        """Return a new model, initialised by torch's generator; its forward returns the loss."""

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        """Return the model's inputs at a step."""

    def mark_untrained(self, marks: dict[str, Tensor]) -> None:
        """Set True, in masks like the matrices, what shall never have a gradient."""


@dataclass(frozen=True)
class Recipe:
    """A training run: AdamW, linear warm-up, cosine to 10 %, gradients clipped to a norm of 1."""

    steps: int
    beta2: float
    beta1: float = BETA1
    seed: int = 0
    task: Task = TextTask()
    peak_lr: float = 1e-3
    weight_decay: float = 0.01
    max_norm: float = 1.0

    @property
    def betas(self) -> tuple[float, float]:
        """Both betas."""
        return self.beta1, self.beta2

    @property
    def warm_up(self) -> int:
        """Number of warm-up steps."""
        return max(1, min(100, self.steps // 10))

    def lr(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        if step < self.warm_up:
            return self.peak_lr * (step + 1) / self.warm_up
        progress = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.peak_lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))


class TrainingRun:
    """The model and its data; whoever drives it provides the optimizer."""

    def __init__(self, recipe: Recipe):
        """Initialise the model from the recipe's seed."""
        self.recipe = recipe
        torch.manual_seed(recipe.seed)
        self.model = recipe.task.make_model()

    def backward(self, step: int) -> None:
        """Add the gradients of one batch to the parameters' `grad`."""
        self.model(*self.recipe.task.batch(self.recipe.seed, step)).backward()

    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Step an optimizer of the model at the learning rate of this step."""
        for group in optimizer.param_groups:
            group["lr"] = self.recipe.lr(step)
        optimizer.step()


def adamw(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """Return the fp32 AdamW that a run is trained with."""
    return torch.optim.AdamW(
        model.parameters(),
        betas=recipe.betas,
        weight_decay=recipe.weight_decay,
        fused=True,
    )


@dataclass(frozen=True)
class Layout:
    """Names and shapes of matrices that lie one after the other in a flat tensor."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]

    @property
    def numel(self) -> int:
        """Elements of all matrices."""
        return sum(math.prod(shape) for shape in self.shapes)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return the matrices as views of a flat tensor."""
        parts = flat.split([math.prod(shape) for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def as_rows(self) -> "Layout":
        """Return the layout in which every matrix is a single row."""
        return Layout(self.names, tuple((1, math.prod(shape)) for shape in self.shapes))


class Gradients:
    """The gradients of a model's large matrices, in one flat buffer that backward adds into.

    Attributes:
        layout: the trained matrices that every 8-bit scheme quantizes: at least 4096 elements.
        flat: (layout.numel,) float32, the gradients.
        untrained: indices into `flat` of the elements whose gradient is always zero.
    """

    def __init__(self, run: TrainingRun):
        """Make the buffer and let the model's parameters use it as their `grad`."""
        trained = [(n, p) for n, p in run.model.named_parameters() if p.requires_grad]
        matrices = [(n, p) for n, p in trained if p.dim() > 1 and p.numel() >= 4096]
        self.layout = Layout(
            tuple(name for name, _ in matrices), tuple(tuple(p.shape) for _, p in matrices)
        )
        self.flat = torch.zeros(self.layout.numel)
        for (_, p), view in zip(matrices, self.layout.views(self.flat), strict=True):
            p.grad = view
        untrained = torch.zeros(self.layout.numel, dtype=torch.bool)
        marks = dict(zip(self.layout.names, self.layout.views(untrained), strict=True))
        run.recipe.task.mark_untrained(marks)
        self.untrained = untrained.nonzero().flatten()
        self._run = run

    def next(self, step: int) -> Tensor:
        """Replace the gradients by those of this step's batch, clipped; return `flat`."""
        model = self._run.model
        model.zero_grad(set_to_none=False)
        self._run.backward(step)
        self.flat[self.untrained] = 0.0
        nn.utils.clip_grad_norm_(model.parameters(), self._run.recipe.max_norm)
        return self.flat
