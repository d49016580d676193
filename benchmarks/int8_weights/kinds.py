# SPDX-License-Identifier: Apache-2.0
"""Ways to keep weights, all stepped by Adam8bitBlockwise with the default codec.

torchao's own rounding is that of `copy_` into its INT8 weights, by which its optimizers end a step:
a new scale of 24 bits per row, and thresholds of torch's global generator.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torchao.prototype.quantized_training import (
    Int8QuantizedTrainingLinearWeight,
    quantize_int8_rowwise,
)

from benchmarks.fidelity.training import Recipe
from zero8.optimizer import Adam8bitBlockwise

FLOAT32 = "float32"


@dataclass(frozen=True)
class Kind:
    """A way to keep weights.

    Attributes:
        stored: returns a parameter with the nearest values to a float32 matrix.
        values: returns a parameter's values, float32.
        keywords: of the optimizer.
        after_step: what is done to a parameter after each step.
    """

    stored: Callable[[Tensor], nn.Parameter]
    values: Callable[[Tensor], Tensor] = Tensor.float
    keywords: dict[str, Any] = field(default_factory=dict)
    after_step: Callable[[nn.Parameter], None] = lambda p: None


def int8(weights: Tensor) -> nn.Parameter:
    """Return torchao's INT8 weights."""
    return nn.Parameter(Int8QuantizedTrainingLinearWeight.from_float(weights))


def decoded(p: Tensor) -> Tensor:
    """Return the values of torchao's INT8 weights."""
    return p.detach().dequantize()


def _float32(weights: Tensor) -> nn.Parameter:
    return nn.Parameter(weights.clone())


def _bfloat16(weights: Tensor) -> nn.Parameter:
    return nn.Parameter(weights.bfloat16())


@torch.no_grad()
def _round_as_torchao(p: nn.Parameter) -> None:
    codes, scales = quantize_int8_rowwise(p, stochastic_rounding=True)
    p.copy_(codes * scales.unsqueeze(1))


KINDS = {
    FLOAT32: Kind(_float32),
    "INT8, nearest": Kind(int8, decoded, {"stochastic_rounding": False}),
    "INT8, torchao's": Kind(_float32, after_step=_round_as_torchao),
    "INT8, hash": Kind(int8, decoded, {"stochastic_rounding": "hash"}),
    "INT8, dither": Kind(int8, decoded, {"stochastic_rounding": "dither"}),
    "bfloat16, nearest": Kind(_bfloat16, keywords={"stochastic_rounding": False}),
    "bfloat16, dither": Kind(_bfloat16, keywords={"stochastic_rounding": "dither"}),
}


class Weights:
    """Matrices that are kept in one way, and their optimizer."""

    def __init__(
        self,
        kind: str,
        matrices: dict[str, Tensor],
        recipe: Recipe,
        others: Iterable[tuple[str, nn.Parameter]] = (),
    ):
        """Keep copies of float32 matrices; `others` are stepped by the same optimizer."""
        self._kind = KINDS[kind]
        self._kept = [self._kind.stored(one) for one in matrices.values()]
        named = [*zip(matrices, self._kept, strict=True), *others]
        settings = {"betas": recipe.betas, "weight_decay": recipe.weight_decay}
        self._optimizer = Adam8bitBlockwise(named, **settings, **self._kind.keywords)

    @property
    def param_groups(self) -> list[dict]:
        """The optimizer's, for the learning rate."""
        return self._optimizer.param_groups

    def set_gradients(self, grads: Iterable[Tensor]) -> None:
        """Set the gradients of the matrices, in their order."""
        for p, grad in zip(self._kept, grads, strict=True):
            p.grad = grad.to(p.dtype)

    def step(self) -> None:
        """Take a step."""
        self._optimizer.step()
        for p in self._kept:
            self._kind.after_step(p)

    def values(self) -> list[Tensor]:
        """Return the values of the matrices, float32."""
        return [self._kind.values(p).detach() for p in self._kept]
