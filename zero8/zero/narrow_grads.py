# SPDX-License-Identifier: Apache-2.0
"""Gradients of the step in host memory in the dtype that they have been reduced in.

DeepSpeed keeps the gradients of float32 master weights in float32, and reduces them in the model's
dtype: with bfloat16 weights each of them is a bfloat16 number.  Here they are kept so: 2 bytes per
parameter less, and half of what crosses the link to a GPU.  The step multiplies them by their
factor in float32, so that its bits do not change.

Where a gradient may become a number that only float32 holds, the engine's are float32 from then on:
before a script writes one, before DeepSpeed uses the last one of a parameter that got none, and
while the optimizer has hooks that run before its step.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from zero8.state.grads import has_other_dtype, set_grad
from zero8.state.tell import tell_once
from zero8.zero.universal_load import LINKS

STATES = "initialize_optimizer_states"
SAVES = "_rigid_state_dict"

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


def narrow(p: Tensor, dtype: torch.dtype) -> None:
    """Replace the gradient of a master weight, which has not been written yet, by a narrower one.

    One in memory that DeepSpeed has page-locked itself stays: it frees this very tensor.
    """
    old = p.grad
    assert old is not None, "DeepSpeed has made it"
    if hasattr(old, "ds_pin_base") or old.dtype == dtype or not can_hold(p, dtype):
        return
    set_grad(p, torch.zeros_like(old, dtype=dtype, pin_memory=old.is_pinned()))


def free_page_locked() -> None:
    """Return the page-locked memory of tensors that are gone, which torch keeps, to the system."""
    if torch.cuda.is_available() and hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()


def widen(zero: Any, why: str) -> None:
    """Have all gradients of an engine's master weights in the dtype of these, from now on."""
    masters = list(filter(has_other_dtype, masters_of(zero)))
    if not masters:
        return
    _wait_for_gradients(zero)
    for p in masters:
        wide = torch.empty_like(p.grad, dtype=p.dtype, pin_memory=p.grad.is_pinned())
        set_grad(p, wide.copy_(p.grad))
    tell_once(f"zero8: gradients in host memory are float32 from now on, and take more: {why}")
    if hasattr(zero, "_get_offload_gradient_dict"):  # views, for safe_get_full_grad
        zero._get_offload_gradient_dict()


def widen_for_hooks(zero: Any) -> None:
    """Widen if hooks run before the optimizer's step: they may change the gradients."""
    if zero.optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks:
        widen(zero, "the optimizer has hooks before its step")


def _wait_for_gradients(zero: Any) -> None:
    """Wait for gradients on their way from a GPU."""
    if hasattr(zero, "_wait_for_offload_copies"):
        zero._wait_for_offload_copies()
    elif torch.cuda.is_available():
        torch.cuda.synchronize()


def keep_narrow(stage12_class: type, stage3_class: type, optimizer_class: type) -> None:
    """Keep the gradients of our optimizer narrow in ZeRO 1 and 2.

    `zero8.zero.sharing` does so in ZeRO-3, whose state dicts then have master weights without
    gradients, as torch cannot deep-copy them together.
    """
    initialize, link = getattr(stage12_class, STATES), getattr(stage12_class, LINKS)
    save = getattr(stage3_class, SAVES)

    def is_ours(zero: Any) -> bool:
        return (
            type(zero) is stage12_class
            and isinstance(zero.optimizer, optimizer_class)
            and zero.cpu_offload
        )

    @functools.wraps(initialize)
    def initialized(self: Any) -> None:
        initialize(self)
        if (
            is_ours(self)
            and self.gradient_accumulation_dtype == self.dtype
            and self.torch_autocast_gradscaler is None  # it multiplies gradients in memory
        ):
            for p in masters_of(self):
                narrow(p, self.dtype)
            free_page_locked()

    @functools.wraps(link)
    def linked(self: Any) -> Any:
        result = link(self)
        if is_ours(self):
            for param in (param for group in self.bit16_groups for param in group):
                param.set_full_hp_grad = _widening(param.set_full_hp_grad, weakref.ref(self))
        return result

    @functools.wraps(save)
    def saved(self: Any) -> Any:
        state_dict, masters = save(self), masters_of(self)
        if isinstance(self.optimizer, optimizer_class) and any(map(has_other_dtype, masters)):
            (name,) = (key for key, value in state_dict.items() if value is masters)
            state_dict[name] = list(map(_without_grad, masters))
        return state_dict

    setattr(stage12_class, STATES, initialized)
    setattr(stage12_class, LINKS, linked)
    setattr(stage3_class, SAVES, saved)


WRITES = "a script writes gradients"


def _widening(write: Callable, zero: Callable) -> Callable:
    @functools.wraps(write)
    def widened(*args: Any) -> Any:
        if (alive := zero()) is not None:
            widen(alive, WRITES)
        return write(*args)

    return widened


def _without_grad(p: Tensor) -> Tensor:
    """Return a leaf of the same memory and attributes."""
    same = p.detach().requires_grad_(p.requires_grad)
    vars(same).update(vars(p))
    return same
