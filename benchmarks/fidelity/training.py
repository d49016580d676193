# SPDX-License-Identifier: Apache-2.0
"""What is trained and how: a setting, its model, and the gradients of its matrices."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

LEAST_NUMEL = 4096
"""Elements of the smallest matrix that every scheme keeps in few bits."""
MAX_NORM = 1.0


class Task:
    """A model and its data; `validation_loss` is only of those that are trained to the end.

    Attributes:
        compared: the elements of all matrices, laid end to end, whose updates are compared.
    """

    compared: ClassVar[slice] = slice(None)

    def make_model(self) -> nn.Module:
        """Return a new model, initialised by torch's generator; its forward returns the loss."""
        raise NotImplementedError

    def batch(self, seed: int, step: int) -> tuple[Tensor, ...]:
        """Return the model's inputs at a step."""
        raise NotImplementedError

    def mark_untrained(self, marks: dict[str, Tensor]) -> None:
        """Set True, in masks like the matrices, what shall never have a gradient."""

    def validation_loss(self, model: nn.Module) -> float:
        """Return the loss of a trained model."""
        raise NotImplementedError


@dataclass(frozen=True)
class Setting:
    """An algorithm on a task, and the schemes that are compared in it.

    The learning rate warms up linearly, then falls by a cosine to 10 %; gradients are clipped.

    Attributes:
        name: what rows call it.
        task: the model and its data.
        steps: of the replay, and of each training.
        algorithm: a key of `benchmarks.fidelity.schemes.CLASSES`.
        options: keywords of its optimizers.
        peak_lr: the learning rate after the warm-up.
        weight_decay: decoupled.
        keeps_weights: whether schemes differ in how weights are kept, rather than in their states.
        replayed: names of schemes that get the gradients of one fp32 run.
        trained: names of schemes that are trained to the end, for a final loss.
        seeds: of these trainings.
    """

    name: str
    task: Task
    steps: int
    algorithm: str = "Adam"
    options: dict[str, Any] = field(default_factory=lambda: {"betas": (0.9, 0.999)})
    peak_lr: float = 1e-3
    weight_decay: float = 0.01
    keeps_weights: bool = False
    replayed: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)

    def lr(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warm_up = max(1, min(100, self.steps // 10))
        if step < warm_up:
            return self.peak_lr * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return self.peak_lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))

    def step(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Step an optimizer at the learning rate of this step."""
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):  # torchao's
                group["lr"].fill_(self.lr(step))
            else:
                group["lr"] = self.lr(step)
        optimizer.step()

    def make_model(self, seed: int) -> nn.Module:
        """Return the model as it is before the first step."""
        torch.manual_seed(seed)
        return self.task.make_model()


class Gradients:
    """The gradients of a model's large matrices.

    Attributes:
        matrices: the trained matrices of at least `LEAST_NUMEL` elements, by name.
        untrained: int64 indices, in all of them laid end to end, of what never has a gradient.
    """

    def __init__(self, setting: Setting, model: nn.Module, seed: int = 0):
        """Look for the matrices of a model."""
        self._setting, self._model, self._seed = setting, model, seed
        named = model.named_parameters()
        self.matrices = {n: p for n, p in named if p.dim() > 1 and p.numel() >= LEAST_NUMEL}
        self._marks = {n: torch.zeros_like(p, dtype=torch.bool) for n, p in self.matrices.items()}
        setting.task.mark_untrained(self._marks)
        self.untrained = flat(self._marks.values()).nonzero().flatten()

    def next(self, step: int) -> list[Tensor]:
        """Replace the model's gradients by those of this step's batch, clipped; return them."""
        self._model.zero_grad()
        self._model(*self._setting.task.batch(self._seed, step)).backward()
        for name, p in self.matrices.items():
            p.grad[self._marks[name]] = 0.0
        nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        return [p.grad for p in self.matrices.values()]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return the elements of all tensors, laid end to end."""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
