# SPDX-License-Identifier: Apache-2.0
"""One training run of the small GPT, a step at a time: the source of gradients and of losses."""

import math
from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor, nn

from zero8.train.data import Text, load_text, train_batch, validation_windows
from zero8.train.model import GPT, GPTConfig

VALIDATION_WINDOWS = 512
PRUNED_MATRIX = "blocks.0.mlp.0.weight"
PRUNED_EVERY = 16


@cache
def _corpus() -> Text:
    return load_text(None)


@dataclass(frozen=True)
class Recipe:
    """A training run: AdamW, linear warm-up, cosine to 10 %, gradients clipped to a norm of 1.

    The windows are shorter than the model's context, so that the last position rows never get a
    gradient.
    """

    steps: int
    beta2: float
    seed: int = 0
    model: GPTConfig = field(
        default_factory=lambda: GPTConfig(context=64, width=256, layers=2, heads=4)
    )
    window: int = 48
    batch: int = 6
    peak_lr: float = 1e-3
    weight_decay: float = 0.01
    max_norm: float = 1.0

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
        self.text = _corpus()
        torch.manual_seed(recipe.seed)
        self.model = GPT(recipe.model)

    def backward(self, step: int) -> None:
        """Add the gradients of one batch to the parameters' `grad`."""
        recipe = self.recipe
        batch = train_batch(
            self.text.train, recipe.batch, recipe.window, seed=recipe.seed, step=step, rank=0
        )
        self.model(batch).backward()

    def update(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Step an optimizer of the model at the learning rate of this step."""
        for group in optimizer.param_groups:
            group["lr"] = self.recipe.lr(step)
        optimizer.step()

    @torch.no_grad()
    def validation_loss(self) -> float:
        """Return the mean loss on windows spread over the validation text, nats per byte."""
        windows = validation_windows(self.text.validation, VALIDATION_WINDOWS, self.recipe.window)
        total = sum(self.model(batch).item() * len(batch) for batch in windows.split(64))
        return total / len(windows)


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
        layout: the matrices that every 8-bit scheme quantizes: at least 4096 elements.
        flat: (layout.numel,) float32, the gradients.
        untrained: indices into `flat` of the elements whose gradient is always zero: position rows
            beyond the window, and every 16th column of one matrix, which is treated as pruned.
    """

    def __init__(self, run: TrainingRun):
        """Make the buffer and let the model's parameters use it as their `grad`."""
        model, window = run.model, run.recipe.window
        matrices = [
            (n, p) for n, p in model.named_parameters() if p.dim() > 1 and p.numel() >= 4096
        ]
        self.layout = Layout(
            tuple(name for name, _ in matrices), tuple(tuple(p.shape) for _, p in matrices)
        )
        self.flat = torch.zeros(self.layout.numel)
        for (_, p), view in zip(matrices, self.layout.views(self.flat), strict=True):
            p.grad = view
        untrained = torch.zeros(self.layout.numel, dtype=torch.bool)
        marks = dict(zip(self.layout.names, self.layout.views(untrained), strict=True))
        marks["position_embedding.weight"][window:] = True
        marks[PRUNED_MATRIX][:, ::PRUNED_EVERY] = True
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
