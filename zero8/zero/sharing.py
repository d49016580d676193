# SPDX-License-Identifier: Apache-2.0
"""One memory for what ZeRO-3 would keep twice in the same dtype and place.

DeepSpeed copies each gradient from the partition that it was reduced to into the buffer that the
step reads; here that buffer is the partitions, whatever the dtype of the master weights.  With
bfloat16 master weights in host memory, and bfloat16 weights offloaded there, too, it copies the
master weights to the weights after each step; here the master weights are the weights.

DeepSpeed's copies are still called.  torch skips a copy of memory onto itself, and they work again
if DeepSpeed moves either side, as `offload_states` does.  On a GPU a gradient still crosses the
link as often as before.

Gradients are shared as long as each step has one micro-batch.  With more, a partition holds a sum,
and the step uses the gradient of an earlier one for a parameter that the last micro-batch does not
use.  The gradients of the step then have a buffer of their own, of the dtype of the partitions:
`zero8.zero.narrow_grads`.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from zero8.state.grads import set_grad
from zero8.zero.narrow_grads import WRITES, can_hold, free_page_locked, narrow, widen

CREATES = "_create_fp32_partitions"
SETS_UP = "_setup_for_real_optimizer"
PARTITIONS = "partition_grads"
TOUCHES = (
    "set_fp32_grad_for_param",
    "set_local_grad_for_param",
    "update_fp32_grad_for_param_vectorized",
    "get_fp32_grad_partitions",
)
"""The methods that write gradients of the step, or give them away to be written."""


def share_in_stage3(zero_class: type, optimizer_class: type) -> None:
    """Have the master weights and gradients of our optimizer share memory where they can."""
    create, set_up, partition = (
        getattr(zero_class, name) for name in (CREATES, SETS_UP, PARTITIONS)
    )

    def may_share(zero: Any) -> bool:
        # Variants that derive from this class, and NVMe, move these tensors in other ways.
        return (
            type(zero) is zero_class
            and isinstance(zero.optimizer, optimizer_class)
            and zero.offload_optimizer
            and not zero.swap_optimizer
            and zero.torch_autocast_gradscaler is None  # it multiplies gradients in memory
            and not zero.params_in_nvme_and_cpu
        )

    @functools.wraps(create)
    def created(self: Any) -> None:
        create(self)
        if may_share(self):
            _share_weights(self)

    @functools.wraps(set_up)
    def is_set_up(self: Any) -> None:
        set_up(self)
        if may_share(self):
            _share_gradients(self, self.gradient_accumulation_steps == 1)
            free_page_locked()

    @functools.wraps(partition)
    def partitioned(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The number of micro-batches may change in training.
        if not self.is_gradient_accumulation_boundary() and may_share(self):
            _separate_gradients(self)
        return partition(self, *args, **kwargs)

    setattr(zero_class, CREATES, created)
    setattr(zero_class, SETS_UP, is_set_up)
    setattr(zero_class, PARTITIONS, partitioned)
    for name in TOUCHES:
        setattr(zero_class, name, _apart_before(getattr(zero_class, name), may_share))


def _apart_before(method: Callable, may_share: Callable) -> Callable:
    @functools.wraps(method)
    def apart(self: Any, *args: Any, **kwargs: Any) -> Any:
        if may_share(self):
            widen(self, WRITES)
            _separate_gradients(self)  # a second backward must not add to what is written
        return method(self, *args, **kwargs)

    return apart


def _share_weights(zero: Any) -> None:
    if any(map(_is_freed_by_deepspeed, zero.param_groups_fp16_flat_cpu_memory)):
        return
    masters, weights = zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat
    for p, weight in zip(masters, weights, strict=True):
        if are_alike(p, weight):
            p.data = weight.data


def _share_gradients(zero: Any, is_one_micro_batch: bool) -> None:
    partitions = zero.grad_partitions_flat_buffer
    can_share = is_one_micro_batch and not _is_freed_by_deepspeed(partitions)
    first = 0
    for p, params in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        numel = sum(param.partition_numel() for param in params)
        reduced = partitions.narrow(0, first, numel)
        first += numel
        if (p.grad.device, p.grad.shape) != (reduced.device, reduced.shape):
            continue
        if can_share and can_hold(p, reduced.dtype):
            set_grad(p, reduced)
        else:
            narrow(p, reduced.dtype)


def _separate_gradients(zero: Any) -> None:
    partitions = zero.grad_partitions_flat_buffer.untyped_storage().data_ptr()
    for p in zero.fp32_partitioned_groups_flat:
        if p.grad is not None and p.grad.untyped_storage().data_ptr() == partitions:
            set_grad(p, p.grad.clone())


def are_alike(one: Tensor, other: Tensor) -> bool:
    """Return whether one tensor can take the other's memory."""
    return (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)


def _is_freed_by_deepspeed(buffer: Tensor) -> bool:
    """Return whether it is page-locked memory that DeepSpeed frees together with the engine."""
    return hasattr(buffer, "ds_pin_base")
