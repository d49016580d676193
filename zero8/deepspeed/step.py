# SPDX-License-Identifier: Apache-2.0
"""The step of an engine: signals wait for its end, and ours makes the passes around it, too.

**Unscaling and clipping.**  DeepSpeed multiplies the gradients of a partition by one factor just
before it calls the optimizer, which reads and writes 8 bytes per parameter.  The step multiplies as
it reads them, with the same bits (`BlockwiseOptimizer.scale_grads`).  On a GPU DeepSpeed's
pass stays.

In host memory the gradients of a partition lie in a buffer that DeepSpeed does not clear.  If a
parameter gets no gradient, its last one is used again, and has been multiplied each time.  Here the
buffer owes such a gradient the factor of the step before, which is paid when it is used again.

**The 16-bit copy of the weights.**  After the step DeepSpeed rounds the master weights in host
memory to the model's dtype: 4 bytes per parameter read and 2 written.  The step writes the same
bits while it has the weights at hand, and DeepSpeed's copy is skipped.  Where it cannot, for one
step or for all, DeepSpeed copies as ever.

ZeRO 1 and 2 copy to a buffer in host memory, and from there to the model's weights.  The buffer is
replaced where that saves its 2 bytes per parameter: without a GPU by the weights themselves, for
torch skips a copy of memory onto itself; else by master weights that are bfloat16 already.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from zero8.deepspeed.gradients import are_alike, masters_of, widen, widen_for_hooks
from zero8.deepspeed.seam import ENGINE, STAGE3, STAGE12, of_engine, rely_on, seam
from zero8.environment.interrupts import put_off
from zero8.op.kernel import COPY_DTYPES


@seam(ENGINE, "step", "a signal handler could save half a step", optimizer=of_engine)
def step_to_the_end(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Defer Python's signal handlers: a step updates groups in turn and counts at the end."""
    with put_off():
        return original(engine, *args, **kwargs)


# --- Unscaling and clipping ----------------------------------------------------------------------

_UNSCALES = "unscale_and_clip_grads"
_FACTOR = "a pass over the gradients would multiply them"


_owed: "WeakKeyDictionary[Any, dict[int, float | Tensor]]" = WeakKeyDictionary()
"""The factors that gradients in buffers have not been multiplied by, by the optimizer of ZeRO.

By number of the parameter, for all that have ever got a gradient; 1 if nothing is owed.
"""


def _pay(zero: Any, param: Any) -> None:
    """Multiply the gradient of a parameter, before it is used again or another is added."""
    owed, number = _owed.setdefault(zero, {}), zero.get_param_id(param)
    factor = owed.get(number, 1.0)
    if factor != 1.0 and number in zero.grad_position:
        widen(zero, "DeepSpeed uses the last gradient of a parameter that got none")
        group, *_, offset, numel = map(int, zero.grad_position[number])
        masters_of(zero)[group].grad.view(-1).narrow(0, offset, numel).mul_(factor)
        owed[number] = 1.0


@seam(STAGE12, _UNSCALES, _FACTOR, "grad_groups_flat", "total_norm")
def unscale12(original: Callable, zero: Any, grad_groups_flat: list, total_norm: Any) -> None:
    """Leave the factor of a group's gradients to the step."""
    if not _can_scale(zero, grad_groups_flat):
        original(zero, grad_groups_flat, total_norm)
        return
    params = []
    if zero.cpu_offload:
        masters = zero.single_partition_of_fp32_groups
        (group,) = (at for at, p in enumerate(masters) if p.grad is grad_groups_flat[0])
        params = zero.params_in_partition[group]
        widen_for_hooks(zero)
    has_factor = zero.clip_grad != 0.0 or zero.loss_scale != 1.0
    _scale_in_step(zero, params, factor_of(zero, total_norm) if has_factor else None)


@seam(STAGE3, _UNSCALES, _FACTOR)
def unscale3(original: Callable, zero: Any, sub_group_id: int, total_norm: Any) -> None:
    """Leave the factor of a sub-group's gradients to the step."""
    if not leave_to_step(zero, sub_group_id, lambda: factor_of(zero, total_norm)):
        original(zero, sub_group_id, total_norm)


def leave_to_step(zero: Any, sub_group_id: int, factor: Callable) -> bool:
    """Leave the factor of a sub-group's gradients to the step of ZeRO-3; return whether it can."""
    grad = zero.fp32_partitioned_groups_flat[sub_group_id].grad
    if not _can_scale(zero, [grad]):
        return False
    params = []
    if zero.offload_optimizer:
        params = zero.fp16_groups[sub_group_id]
        widen_for_hooks(zero)
    _scale_in_step(zero, params, factor())
    return True


def _can_scale(zero: Any, grads: list[Tensor | None]) -> bool:
    # torch's scaler, which is there with torch.autocast in fp16, multiplies gradients once more.
    return zero.torch_autocast_gradscaler is None and all(
        isinstance(grad, Tensor) and grad.device.type == "cpu" for grad in grads
    )


def _scale_in_step(zero: Any, params: list, factor: "float | Tensor | None") -> None:
    """Give the step its factor, if any; `params` are those whose gradients lie in a buffer."""
    arrived, owed = (zero.norm_for_param_grads, _owed.setdefault(zero, {})) if params else ({}, {})
    for param in params:
        number = zero.get_param_id(param)
        if number not in arrived:
            _pay(zero, param)
        if number in arrived or number in owed:
            owed[number] = 1.0 if factor is None else factor
    if factor is not None:
        zero.optimizer.scale_grads(factor)


def factor_of(zero: Any, total_norm: Any) -> "float | Tensor":
    """Return the factor of the gradients, in the operations of DeepSpeed's methods."""
    from deepspeed.runtime.utils import is_invalid_grad_norm

    scale = zero.loss_scale
    if zero.clip_grad > 0.0:
        if is_invalid_grad_norm(total_norm):
            total_norm = torch.tensor(float("inf"), dtype=torch.float, device=zero.device)
        clip = ((total_norm / scale) + 1e-6) / zero.clip_grad
        scale = torch.clamp(clip, min=1.0) * scale
    return 1.0 / scale


@seam(STAGE12, "reset_cpu_buffers", _FACTOR)
@seam(STAGE3, "reset_cpu_buffers", _FACTOR)
def reset_buffers(original: Callable, zero: Any) -> None:
    """Owe gradients nothing that have arrived for a step that overflows."""
    if zero.overflow:
        _owed.setdefault(zero, {}).update(dict.fromkeys(zero.norm_for_param_grads, 1.0))
    original(zero)


@seam(STAGE12, "async_accumulate_grad_in_cpu_via_gpu", _FACTOR, "param")
def accumulate(original: Callable, zero: Any, param: Any) -> None:
    """Pay what a gradient is owed before another is added."""
    if zero.low_precision_master_weights_and_grads:  # in the buffer itself
        _pay(zero, param)
    original(zero, param)


# --- The 16-bit copy of the weights --------------------------------------------------------------

_STEPS = "_optimizer_step"
_COPY = "a pass would round the weights to 16 bits"


class CopyTarget(torch.Tensor):
    """A buffer that skips one copy of the weights that a step has already written to it.

    DeepSpeed makes that copy in the middle of a method of a hundred lines.

    Attributes:
        written_from: the address of these weights; None if the next copy is to be made.
    """

    written_from: int | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Skip that copy; `.data` is the buffer itself; everything else is as of a plain tensor."""
        target = args[0] if args else None
        if isinstance(target, cls):
            if func == torch.Tensor.data.__get__:  # equal, but another object at each access
                return target
            if func is torch.Tensor.copy_ and target.written_from is not None:
                written_from, target.written_from = target.written_from, None
                if args[1].data_ptr() == written_from:
                    return target
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


_noted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""By partition, where its copy is and the version of its weights after the last step."""


def _step_with_copy(optimizer: Any, p: Tensor, target: Tensor | None, step: Callable) -> bool:
    """Call `step`; return whether it has written the copy of a partition to `target`.

    The elements between parameters, which no step touches, are copied by DeepSpeed once; if another
    than our steps has written to the partition since, again.
    """
    if target is None or not _can_write(optimizer, p, target):
        step()
        return False
    expected = target.data_ptr(), p._version
    if _noted.get(p) == expected:
        optimizer.copies[p] = target
    try:
        step()
        is_written = _noted.get(p) == expected and p not in optimizer.copies
    finally:
        optimizer.copies.clear()
    _noted[p] = target.data_ptr(), p._version
    return is_written


def _can_write(optimizer: Any, p: Tensor, target: Tensor) -> bool:
    return (
        target.dtype in COPY_DTYPES.get(p.dtype, ())
        and p.device.type == target.device.type == "cpu"
        and p.data_ptr() != target.data_ptr()
        and target.is_contiguous()
        and p.numel() == target.numel()
        # A hook may change the weights after the step.
        and not optimizer._optimizer_step_post_hooks
        and not _global_optimizer_post_hooks
    )


@seam(STAGE12, _STEPS, _COPY, "group_no")
def step12(original: Callable, zero: Any, group_no: int) -> None:
    """Step a group, and write the copy that DeepSpeed would make next."""
    buffers = zero.param_buffer_of_bit16_for_cpu_offload_groups if zero.cpu_offload else []
    # DeepSpeed frees memory that it has page-locked itself with this very object.
    if not buffers or hasattr(buffers[group_no], "ds_pin_base"):
        original(zero, group_no)
        return
    p = zero.single_partition_of_fp32_groups[group_no]
    buffers[group_no] = target = _buffer(p, buffers[group_no], _weights(zero, group_no))
    is_written = _step_with_copy(zero.optimizer, p, target, lambda: original(zero, group_no))
    if isinstance(target, CopyTarget):
        target.written_from = p.data_ptr() if is_written else None


def _weights(zero: Any, group_no: int) -> Tensor:
    """Return this rank's partition of the model's weights."""
    rank = torch.distributed.get_rank(zero.real_dp_process_group[group_no])
    weights: Tensor = zero.parallel_partitioned_bit16_groups[group_no][rank]
    return weights


def _buffer(p: Tensor, buffer: Tensor, weights: Tensor) -> Tensor:
    """Return what to copy the master weights to instead of DeepSpeed's buffer, or that."""
    if are_alike(weights, buffer):
        return weights.detach().as_subclass(CopyTarget)
    if are_alike(p, buffer):
        return p.data
    return buffer if isinstance(buffer, CopyTarget) else buffer.as_subclass(CopyTarget)


_written: "WeakKeyDictionary[Any, set[int]]" = WeakKeyDictionary()
"""By optimizer of ZeRO-3, the sub-groups whose copies their steps have written."""

rely_on(STAGE3, "_unflatten_partitioned_parameters", "sub_group_id")


@seam(STAGE3, _STEPS, _COPY, "sub_group_id")
def step3(original: Callable, zero: Any, sub_group_id: int) -> None:
    """Step a sub-group, and write the copy that DeepSpeed would make next."""
    step_sub_group(zero, sub_group_id, lambda: original(zero, sub_group_id))


def step_sub_group(zero: Any, sub_group_id: int, take: Callable) -> None:
    """Call what steps a sub-group of ZeRO-3, and write the copy that DeepSpeed would make next."""
    p = zero.fp32_partitioned_groups_flat[sub_group_id]
    target = zero.fp16_partitioned_groups_flat[sub_group_id]
    written = _written.setdefault(zero, set())
    written.discard(sub_group_id)
    if _step_with_copy(zero.optimizer, p, target, take):
        written.add(sub_group_id)


@seam(STAGE3, "_reassign_or_swap_out_partitioned_parameters", _COPY)
def reassign(original: Callable, zero: Any, sub_group_id: int) -> None:
    """Do all but the copy that a step has written."""
    written = _written.get(zero, ())
    if sub_group_id in written:
        written.remove(sub_group_id)
        zero._unflatten_partitioned_parameters(sub_group_id)
    else:
        original(zero, sub_group_id)
