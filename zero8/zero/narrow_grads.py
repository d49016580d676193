# SPDX-License-Identifier: Apache-2.0
"""Gradients of the step in host memory in the dtype that they have been reduced in.

DeepSpeed keeps the gradients of float32 master weights in float32, and reduces them in the model's
dtype: with bfloat16 weights each of them is a bfloat16 number.  Here they are kept so: 2 bytes per
parameter less, and half of what crosses the link to a GPU.  The step multiplies them by their
factor in float32, so that its bits do not change.

Where a gradient may become a number that only float32 holds, the engine's are float32 from then on:
before a script writes one, and before DeepSpeed uses the last one of a parameter that got none.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zero8.state.tell import tell_once
from zero8.zero.universal_load import LINKS

STATES = "initialize_optimizer_states"
TOUCHES = (
    "set_fp32_grad_for_param",
    "set_local_grad_for_param",
    "update_fp32_grad_for_param_vectorized",
    "get_fp32_grad_partitions",
)
"""The methods of ZeRO-3 that write gradients of the step, or give them away to be written."""

_MASTERS = "single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"


def masters_of(zero: Any) -> list[Tensor]:
    """Return the partitions of the master weights, of any stage."""
    (name,) = (one for one in _MASTERS if hasattr(zero, one))
    masters: list[Tensor] = getattr(zero, name)
    return masters


def can_hold(p: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a master weight's gradient can have a dtype."""
    is_narrower = p.dtype == torch.float32 and dtype in (torch.bfloat16, torch.float16)
    # Older versions of torch refuse a gradient of another dtype than the parameter's.
    return dtype == p.dtype or (is_narrower and hasattr(Tensor, "grad_dtype"))


def set_grad(p: Tensor, grad: Tensor) -> None:
    """Set the gradient of a master weight, of a dtype that it `can_hold`."""
    p.grad = None
    if hasattr(Tensor, "grad_dtype"):
        p.grad_dtype = grad.dtype
    p.grad = grad


def narrow(p: Tensor, dtype: torch.dtype) -> None:
    """Replace the gradient of a master weight, which has not been written yet, by a narrower one.

    One in memory that DeepSpeed has page-locked itself stays: it frees this very tensor.
    """
    old = p.grad
    if hasattr(old, "ds_pin_base") or not can_hold(p, dtype):
        return
    set_grad(p, torch.zeros_like(old, dtype=dtype, pin_memory=old.is_pinned()))


def widen(zero: Any, why: str) -> None:
    """Have all gradients of an engine's master weights in the dtype of these, from now on."""
    masters = [p for p in masters_of(zero) if p.grad is not None and p.grad.dtype != p.dtype]
    for p in masters:
        set_grad(p, p.grad.to(p.dtype))
    if not masters:
        return
    tell_once(f"zero8: gradients in host memory now take 4 bytes per parameter instead of 2: {why}")
    if hasattr(zero, "_get_offload_gradient_dict"):  # views, for safe_get_full_grad
        zero._get_offload_gradient_dict()


def keep_narrow(stage12_class: type, stage3_class: type, optimizer_class: type) -> None:
    """Keep the gradients of our optimizer narrow in ZeRO 1 and 2; widen those of all stages.

    `zero8.zero.sharing` makes those of ZeRO-3 narrow.
    """
    initialize, link = getattr(stage12_class, STATES), getattr(stage12_class, LINKS)

    def is_ours(zero: Any) -> bool:
        return type(zero) is stage12_class and isinstance(zero.optimizer, optimizer_class)

    @functools.wraps(initialize)
    def initialized(self: Any) -> None:
        initialize(self)
        if (
            is_ours(self)
            and self.cpu_offload
            and self.gradient_accumulation_dtype == self.dtype
            and self.torch_autocast_gradscaler is None  # it multiplies gradients in memory
        ):
            for p in masters_of(self):
                narrow(p, self.dtype)

    @functools.wraps(link)
    def linked(self: Any) -> Any:
        result = link(self)
        if is_ours(self) and self.cpu_offload:
            for param in (param for group in self.bit16_groups for param in group):
                param.set_full_hp_grad = _widening(param.set_full_hp_grad, weakref.ref(self))
        return result

    setattr(stage12_class, STATES, initialized)
    setattr(stage12_class, LINKS, linked)
    for name in TOUCHES:
        _widen_before(stage3_class, name, optimizer_class)


_WRITES = "a script writes gradients"


def _widening(write: Callable, zero: Callable) -> Callable:
    @functools.wraps(write)
    def widened(*args: Any) -> Any:
        if (alive := zero()) is not None:
            widen(alive, _WRITES)
        return write(*args)

    return widened


def _widen_before(zero_class: type, name: str, optimizer_class: type) -> None:
    method = getattr(zero_class, name)

    @functools.wraps(method)
    def widened(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.optimizer, optimizer_class) and self.offload_optimizer:
            widen(self, _WRITES)
        return method(self, *args, **kwargs)

    setattr(zero_class, name, widened)
