# SPDX-License-Identifier: Apache-2.0
"""Gradients and weights in host memory: kept in 16 bits where they are, and once.

**In 16 bits.**  DeepSpeed keeps the gradients of float32 master weights in float32, and reduces
them in the model's dtype: with bfloat16 weights each of them is a bfloat16 number.  Here they are
kept so: 2 bytes per parameter less, and half of what crosses the link to a GPU.  The step
multiplies them by their factor in float32, so that its bits do not change.

Where a gradient may become a number that only float32 holds, the engine's are float32 from then on:
before a script writes one, before DeepSpeed uses the last one of a parameter that got none, and
while the optimizer has hooks that run before its step.

**Once**, in ZeRO-3.  DeepSpeed copies each gradient from the partition that it was reduced to into
the buffer that the step reads; here that buffer is the partitions, whatever the dtype of the master
weights.  With bfloat16 master weights in host memory, and bfloat16 weights offloaded there, too, it
copies the master weights to the weights after each step; here the master weights are the weights.
DeepSpeed's copies are still called.  torch skips a copy of memory onto itself, and they work again
if DeepSpeed moves either side, as `offload_states` does.  On a GPU a gradient still crosses the
link as often as before.

Gradients are shared as long as each step has one micro-batch.  With more, a partition holds a sum,
and the step uses the gradient of an earlier one for a parameter that the last micro-batch does not
use.  The gradients of the step then have a buffer of their own, of the dtype of the partitions.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_pre_hooks

from zero8.deepspeed.nvme import beside, is_on_disk, make_masters
from zero8.deepspeed.page_locked import page_locked_zeros
from zero8.deepspeed.seam import STAGE3, STAGE12, seam
from zero8.state.grads import has_other_dtype, set_grad
from zero8.state.tell import tell_once

_MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
)
_WRITES = "a script writes gradients"
_WIDE = "gradients in host memory would be float32"
_TWICE = "weights and gradients would be in host memory twice"


def masters_of(zero: Any) -> list[Tensor]:
    """Return the partitions of the master weights, of any stage and of BF16_Optimizer."""
    (name,) = (one for one in _MASTERS if hasattr(zero, one))
    masters: list[Tensor] = getattr(zero, name)
    return masters


# --- In 16 bits ----------------------------------------------------------------------------------


@seam(STAGE12, "initialize_optimizer_states", _WIDE)
def initialize(original: Callable, zero: Any) -> None:
    """Have the gradients of ZeRO 1 and 2 narrow from the start; `set_up` does so in ZeRO-3."""
    original(zero)
    if (
        zero.cpu_offload
        and zero.gradient_accumulation_dtype == zero.dtype
        and zero.torch_autocast_gradscaler is None  # it multiplies gradients in memory
    ):
        for p in masters_of(zero):
            _narrow(p, zero.dtype)
        _free_page_locked()


@seam(STAGE12, "_link_all_hp_params", "parameters would be looked for at wrong places")
def link(original: Callable, zero: Any) -> None:
    """Find parameters under `round_robin_gradients`, and widen gradients before scripts write them.

    DeepSpeed reads the true offsets only if there is padding between parameters, so this pretends
    that there is.
    """
    paddings = zero.round_robin_bit16_padding
    if zero.round_robin_gradients:
        zero.round_robin_bit16_padding = [[1] for _ in paddings]
    try:
        original(zero)
    finally:
        zero.round_robin_bit16_padding = paddings
    if zero.cpu_offload:
        for param in (param for group in zero.bit16_groups for param in group):
            param.set_full_hp_grad = _widening(param.set_full_hp_grad, weakref.ref(zero))


@seam(STAGE3, "_rigid_state_dict", "torch could not copy master weights with narrow gradients")
def save(original: Callable, zero: Any) -> dict:
    """Return a state dict whose master weights have no gradients, as torch's of another dtype."""
    state_dict, masters = original(zero), masters_of(zero)
    if any(map(has_other_dtype, masters)):
        (name,) = (key for key, value in state_dict.items() if value is masters)
        state_dict[name] = list(map(_without_grad, masters))
    return state_dict


def widen(zero: Any, why: str) -> None:
    """Have all gradients of an engine's master weights in the dtype of these, from now on."""
    masters = list(filter(has_other_dtype, masters_of(zero)))
    if not masters:
        return
    _wait_for_gradients(zero)
    for p in masters:
        set_grad(p, _new_grad(p, p.dtype).copy_(p.grad))
    tell_once(f"zero8: gradients in host memory are float32 from now on, and take more: {why}")
    if hasattr(zero, "_get_offload_gradient_dict"):  # views, for safe_get_full_grad
        zero._get_offload_gradient_dict()


def widen_for_hooks(zero: Any) -> None:
    """Widen if hooks run before the optimizer's step: they may change the gradients."""
    if zero.optimizer._optimizer_step_pre_hooks or _global_optimizer_pre_hooks:
        widen(zero, "the optimizer has hooks before its step")


def _can_hold(p: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a master weight's gradient can have a dtype."""
    is_narrower = p.dtype == torch.float32 and dtype in (torch.bfloat16, torch.float16)
    return dtype == p.dtype or is_narrower


def _narrow(p: Tensor, dtype: torch.dtype) -> None:
    """Replace the gradient of a master weight, which has not been written yet, by a narrower one.

    One in memory that DeepSpeed has page-locked itself stays: it frees this very tensor.
    """
    old = p.grad
    assert old is not None, "DeepSpeed has made it"
    is_there = old.dtype == dtype and not is_on_disk(p)
    if _is_freed_by_deepspeed(old) or is_there or not _can_hold(p, dtype):
        return
    set_grad(p, _new_grad(p, dtype))


def _new_grad(p: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a gradient of zeros where a master weight has one, or belongs to be."""
    old = p.grad
    assert old is not None, "DeepSpeed has made it"
    if old.is_pinned():
        return page_locked_zeros(old.shape, dtype)
    return beside(p, torch.zeros_like(old, dtype=dtype))


def _free_page_locked() -> None:
    """Return the page-locked memory of tensors that are gone, which torch keeps, to the system."""
    if torch.cuda.is_available() and hasattr(torch.accelerator, "empty_host_cache"):
        torch.accelerator.empty_host_cache()


def _wait_for_gradients(zero: Any) -> None:
    """Wait for gradients on their way from a GPU."""
    if hasattr(zero, "_wait_for_offload_copies"):
        zero._wait_for_offload_copies()
    elif torch.cuda.is_available():
        torch.cuda.synchronize()


def _widening(write: Callable, zero: Callable) -> Callable:
    @functools.wraps(write)
    def widened(*args: Any) -> Any:
        if (alive := zero()) is not None:
            widen(alive, _WRITES)
        return write(*args)

    return widened


def _without_grad(p: Tensor) -> Tensor:
    """Return a leaf of the same memory and attributes."""
    same = p.detach().requires_grad_(p.requires_grad)
    vars(same).update(vars(p))
    return same


# --- Once ----------------------------------------------------------------------------------------


def _may_share(zero: Any) -> bool:
    return (
        zero.offload_optimizer
        and zero.torch_autocast_gradscaler is None  # it multiplies gradients in memory
        and not zero.params_in_nvme_and_cpu
    )


@seam(STAGE3, "_create_fp32_partitions", _TWICE)
def create(original: Callable, zero: Any) -> None:
    """Have bfloat16 master weights share the memory of the weights."""
    make_masters(zero, original)
    if not _may_share(zero) or any(
        map(_is_freed_by_deepspeed, zero.param_groups_fp16_flat_cpu_memory)
    ):
        return
    masters, weights = zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat
    for p, weight in zip(masters, weights, strict=True):
        if are_alike(p, weight):
            p.data = weight.data


@seam(STAGE3, "_setup_for_real_optimizer", _TWICE)
def set_up(original: Callable, zero: Any) -> None:
    """Have the gradients of the step share the memory of those that are reduced."""
    original(zero)
    if not _may_share(zero):
        return
    partitions = zero.grad_partitions_flat_buffer
    can_share = zero.gradient_accumulation_steps == 1 and not _is_freed_by_deepspeed(partitions)
    first = 0
    for p, params in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        numel = sum(param.partition_numel() for param in params)
        reduced = partitions.narrow(0, first, numel)
        first += numel
        if (p.grad.device, p.grad.shape) != (reduced.device, reduced.shape):
            continue
        if can_share and _can_hold(p, reduced.dtype):
            set_grad(p, reduced)
        else:
            _narrow(p, reduced.dtype)
    _free_page_locked()


@seam(STAGE3, "partition_grads", _TWICE)
def partition(original: Callable, zero: Any, *args: Any, **kwargs: Any) -> Any:
    """Separate gradients before a second micro-batch: their number may change in training."""
    if not zero.is_gradient_accumulation_boundary() and _may_share(zero):
        _separate_gradients(zero)
    return original(zero, *args, **kwargs)


@seam(STAGE3, "set_fp32_grad_for_param", _TWICE)
@seam(STAGE3, "set_local_grad_for_param", _TWICE)
@seam(STAGE3, "update_fp32_grad_for_param_vectorized", _TWICE)
@seam(STAGE3, "get_fp32_grad_partitions", _TWICE)
def touch(original: Callable, zero: Any, *args: Any, **kwargs: Any) -> Any:
    """Write gradients of the step, or give them away to be written, when they are separate."""
    if _may_share(zero):
        widen(zero, _WRITES)
        _separate_gradients(zero)  # a second backward must not add to what is written
    return original(zero, *args, **kwargs)


def _separate_gradients(zero: Any) -> None:
    partitions = zero.grad_partitions_flat_buffer.untyped_storage().data_ptr()
    for p in zero.fp32_partitioned_groups_flat:
        if p.grad is not None and p.grad.untyped_storage().data_ptr() == partitions:
            set_grad(p, _new_grad(p, p.grad.dtype).copy_(p.grad))


def are_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether one tensor can take the other's memory."""
    return (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)


def _is_freed_by_deepspeed(buffer: Tensor) -> bool:
    """Return whether it is page-locked memory that DeepSpeed frees together with the engine."""
    return hasattr(buffer, "ds_pin_base")
