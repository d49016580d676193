# SPDX-License-Identifier: Apache-2.0
"""Unscaling and clipping under ZeRO: a factor of the step instead of a pass over the gradients.

DeepSpeed multiplies the gradients of a partition by one factor just before it calls the optimizer,
which reads and writes 8 bytes per parameter.  The step multiplies as it reads them, with the same
bits (`BlockwiseOptimizer.scale_grads`).  On a GPU, and for gradients on NVMe, DeepSpeed's pass
stays.

In host memory the gradients of a partition lie in a buffer that DeepSpeed does not clear.  If a
parameter gets no gradient, its last one is used again, and has been multiplied each time.  Here the
buffer owes such a gradient the factor of the step before, which is paid when it is used again.
"""

import functools
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from zero8.zero.narrow_grads import masters_of, widen, widen_for_hooks
from zero8.zero.stand_in import StandIn

UNSCALES = "unscale_and_clip_grads"
RESETS = "reset_cpu_buffers"
ACCUMULATES = "async_accumulate_grad_in_cpu_via_gpu"


class _Grad:
    """Stands for a gradient, and keeps the factor that it is multiplied by."""

    factor: "float | Tensor | None" = None

    @property
    def data(self) -> "_Grad":
        return self

    def mul_(self, factor: "float | Tensor") -> None:
        self.factor = factor


class _Owed:
    """The factors that gradients in buffers have not been multiplied by.

    By number of the parameter, for all that have ever got a gradient; 1 if nothing is owed.
    """

    def __init__(self) -> None:
        self._factors: WeakKeyDictionary[Any, dict[int, float | Tensor]] = WeakKeyDictionary()

    def pay_unused(self, zero: Any, params: list) -> None:
        """Multiply the gradients of parameters that have got none since the step before."""
        for param in params:
            if zero.get_param_id(param) not in zero.norm_for_param_grads:
                self.pay(zero, param)

    def pay(self, zero: Any, param: Any) -> None:
        """Multiply the gradient of a parameter, before it is used again or another is added."""
        number = zero.get_param_id(param)
        factor = self._of(zero).get(number, 1.0)
        if factor != 1.0 and number in zero.grad_position:
            widen(zero, "DeepSpeed uses the last gradient of a parameter that got none")
            _gradient(zero, number).mul_(factor)
            self._of(zero)[number] = 1.0

    def note(self, zero: Any, params: list, factor: "float | Tensor | None") -> None:
        """Note the factor of a step; None if it had none."""
        for param in params:
            number = zero.get_param_id(param)
            if number in zero.norm_for_param_grads or number in self._of(zero):
                self._of(zero)[number] = 1.0 if factor is None else factor

    def forget_arrived(self, zero: Any) -> None:
        """Owe nothing to gradients that have arrived for a step that is skipped."""
        self._of(zero).update(dict.fromkeys(zero.norm_for_param_grads, 1.0))

    def _of(self, zero: Any) -> "dict[int, float | Tensor]":
        return self._factors.setdefault(zero, {})


def _gradient(zero: Any, number: int) -> Tensor:
    """Return the gradient of the parameter with a number, in the buffer of this rank."""
    group, *_, offset, numel = map(int, zero.grad_position[number])
    grad = masters_of(zero)[group].grad
    assert grad is not None, "the buffers of gradients stay"
    return grad.view(-1).narrow(0, offset, numel)


def leave_to_step(stage12_class: type, stage3_class: type, optimizer_class: type) -> None:
    """Have the optimizers of ZeRO leave the multiplication to ours, for gradients on the CPU."""
    unscale12, unscale3 = (getattr(one, UNSCALES) for one in (stage12_class, stage3_class))
    owed = _Owed()

    def is_ours(zero: Any, zero_class: type, grads: list[Tensor | None]) -> bool:
        # Variants that derive from these classes step in other ways, and torch's scaler, which is
        # there with torch.autocast in fp16, multiplies gradients once more.
        return (
            type(zero) is zero_class
            and isinstance(zero.optimizer, optimizer_class)
            and getattr(zero, "torch_autocast_gradscaler", None) is None
            and not getattr(zero, "swap_optimizer", False)
            and all(isinstance(grad, Tensor) and grad.device.type == "cpu" for grad in grads)
        )

    @functools.wraps(unscale12)
    def in_stage12(self: Any, grad_groups_flat: list, total_norm: Any) -> None:
        if not is_ours(self, stage12_class, grad_groups_flat):
            unscale12(self, grad_groups_flat, total_norm)
            return
        grad, params = _Grad(), []
        if self.cpu_offload:
            masters = self.single_partition_of_fp32_groups
            (group,) = (at for at, p in enumerate(masters) if p.grad is grad_groups_flat[0])
            params = self.params_in_partition[group]
            widen_for_hooks(self)
        owed.pay_unused(self, params)
        unscale12(self, [grad], total_norm)
        if grad.factor is not None:  # None: nothing to clip and no loss scale
            self.optimizer.scale_grads(grad.factor)
        owed.note(self, params, grad.factor)

    @functools.wraps(unscale3)
    def in_stage3(self: Any, sub_group_id: int, total_norm: Any) -> None:
        if not is_ours(self, stage3_class, [self.fp32_partitioned_groups_flat[sub_group_id].grad]):
            unscale3(self, sub_group_id, total_norm)
            return
        params = []
        if self.offload_optimizer:
            params = self.fp16_groups[sub_group_id]
            widen_for_hooks(self)
        owed.pay_unused(self, params)
        grad = _Grad()
        groups = {sub_group_id: SimpleNamespace(grad=grad)}
        with_grad = StandIn(self, fp32_partitioned_groups_flat=groups)
        unscale3(with_grad, sub_group_id, total_norm)
        assert grad.factor is not None, "ZeRO-3 multiplies always"
        self.optimizer.scale_grads(grad.factor)
        owed.note(self, params, grad.factor)

    setattr(stage12_class, UNSCALES, in_stage12)
    setattr(stage3_class, UNSCALES, in_stage3)
    for zero_class in (stage12_class, stage3_class):
        _forget_on_overflow(zero_class, owed)
    _pay_before_accumulation(stage12_class, owed)


def _forget_on_overflow(zero_class: type, owed: _Owed) -> None:
    reset = getattr(zero_class, RESETS)

    @functools.wraps(reset)
    def after_overflow(self: Any) -> None:
        if self.overflow:
            owed.forget_arrived(self)
        reset(self)

    setattr(zero_class, RESETS, after_overflow)


def _pay_before_accumulation(zero_class: type, owed: _Owed) -> None:
    accumulate = getattr(zero_class, ACCUMULATES)

    @functools.wraps(accumulate)
    def paid(self: Any, param: Any) -> None:
        if self.low_precision_master_weights_and_grads:  # in the buffer itself
            owed.pay(self, param)
        accumulate(self, param)

    setattr(zero_class, ACCUMULATES, paid)
