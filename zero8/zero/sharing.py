# SPDX-License-Identifier: Apache-2.0
"""One memory for what ZeRO-3 would keep twice in the same dtype and place.

With bfloat16 master weights in host memory, and bfloat16 weights offloaded there, too, DeepSpeed
copies the master weights to the weights after each step, and each gradient from the partition that
it was reduced to into the buffer that the step reads.  Here the master weights are the weights and
that buffer is the partitions: 4 bytes per parameter less, and two passes.

DeepSpeed's copies are still called, and copy nothing, as torch skips a copy onto itself.  So they
work again if DeepSpeed moves either side, as `offload_states` does.
"""

import functools
from typing import Any

from torch import Tensor

CREATES = "_create_fp32_partitions"
SETS_UP = "_setup_for_real_optimizer"


def share_in_stage3(zero_class: type, optimizer_class: type) -> None:
    """Have the master weights and gradients of our optimizer share memory where they can."""
    create, set_up = getattr(zero_class, CREATES), getattr(zero_class, SETS_UP)

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
            _share_gradients(self)

    setattr(zero_class, CREATES, created)
    setattr(zero_class, SETS_UP, is_set_up)


def _share_weights(zero: Any) -> None:
    if any(map(_is_freed_by_deepspeed, zero.param_groups_fp16_flat_cpu_memory)):
        return
    masters, weights = zero.fp32_partitioned_groups_flat, zero.fp16_partitioned_groups_flat
    for p, weight in zip(masters, weights, strict=True):
        if _are_alike(p, weight):
            p.data = weight.data


def _share_gradients(zero: Any) -> None:
    partitions = zero.grad_partitions_flat_buffer
    if _is_freed_by_deepspeed(partitions):
        return
    first = 0
    for p, params in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        numel = sum(param.partition_numel() for param in params)
        reduced = partitions.narrow(0, first, numel)
        first += numel
        if _are_alike(p.grad, reduced):
            p.grad = reduced


def separate_gradients(zero: Any, params: list) -> None:
    """Give the gradients of a sub-group memory of their own, before they are multiplied in it.

    With gradient accumulation, DeepSpeed adds to what a parameter's partition holds if the
    parameter was not used in the first micro-batch, be it a gradient of an earlier step.
    """
    if not hasattr(zero, "grad_partitions_flat_buffer") or zero.gradient_accumulation_steps == 1:
        return
    memory = zero.grad_partitions_flat_buffer.untyped_storage().data_ptr()
    for group in {int(zero.grad_position[zero.get_param_id(param)][0]) for param in params}:
        p = zero.fp32_partitioned_groups_flat[group]
        if p.grad.untyped_storage().data_ptr() == memory:
            p.grad = p.grad.clone()


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape)


def _is_freed_by_deepspeed(buffer: Tensor) -> bool:
    """Return whether it is page-locked memory that DeepSpeed frees together with the engine."""
    return hasattr(buffer, "ds_pin_base")
