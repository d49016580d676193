# SPDX-License-Identifier: Apache-2.0
"""Unscaling and clipping under ZeRO: a factor of the step instead of a pass over the gradients.

DeepSpeed multiplies the gradients of a partition by one factor just before it calls the optimizer,
which reads and writes 8 bytes per parameter.  The step multiplies as it reads them, with the same
bits (`BlockwiseOptimizer.scale_grads`).  On a GPU DeepSpeed's pass stays.
"""

import functools
from types import SimpleNamespace
from typing import Any

from torch import Tensor

UNSCALES = "unscale_and_clip_grads"


class _Grad:
    """Stands for a gradient, and keeps the factor that it is multiplied by."""

    factor: "float | Tensor | None" = None

    @property
    def data(self) -> "_Grad":
        return self

    def mul_(self, factor: "float | Tensor") -> None:
        self.factor = factor


class _WithGrad:
    """ZeRO-3's optimizer, with a stand-in for the gradient of one sub-group."""

    def __init__(self, zero: Any, sub_group_id: int, grad: _Grad):
        self._zero = zero
        self.fp32_partitioned_groups_flat = {sub_group_id: SimpleNamespace(grad=grad)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._zero, name)


def leave_to_step(stage12_class: type, stage3_class: type, optimizer_class: type) -> None:
    """Have the optimizers of ZeRO leave the multiplication to ours, for gradients on the CPU."""
    unscale12, unscale3 = (getattr(one, UNSCALES) for one in (stage12_class, stage3_class))

    def is_ours(zero: Any, zero_class: type, grads: list[Tensor | None]) -> bool:
        # Variants that derive from these classes step in other ways, and torch's scaler, which is
        # there with torch.autocast in fp16, multiplies gradients once more.
        return (
            type(zero) is zero_class
            and isinstance(zero.optimizer, optimizer_class)
            and getattr(zero, "torch_autocast_gradscaler", None) is None
            and all(isinstance(grad, Tensor) and grad.device.type == "cpu" for grad in grads)
        )

    @functools.wraps(unscale12)
    def in_stage12(self: Any, grad_groups_flat: list, total_norm: Any) -> None:
        if not is_ours(self, stage12_class, grad_groups_flat):
            unscale12(self, grad_groups_flat, total_norm)
            return
        grad = _Grad()
        unscale12(self, [grad], total_norm)
        if grad.factor is not None:  # None: nothing to clip and no loss scale
            self.optimizer.scale_grads(grad.factor)

    @functools.wraps(unscale3)
    def in_stage3(self: Any, sub_group_id: int, total_norm: Any) -> None:
        if not is_ours(self, stage3_class, [self.fp32_partitioned_groups_flat[sub_group_id].grad]):
            unscale3(self, sub_group_id, total_norm)
            return
        grad = _Grad()
        unscale3(_WithGrad(self, sub_group_id, grad), sub_group_id, total_norm)
        assert grad.factor is not None, "ZeRO-3 multiplies always"
        self.optimizer.scale_grads(grad.factor)

    setattr(stage12_class, UNSCALES, in_stage12)
    setattr(stage3_class, UNSCALES, in_stage3)
