# SPDX-License-Identifier: Apache-2.0
"""The 16-bit copy of master weights under ZeRO, written by the step itself.

After the step DeepSpeed rounds the master weights in host memory to the model's dtype: 4 bytes per
parameter read and 2 written.  The step writes the same bits while it has the weights at hand, and
DeepSpeed's copy is skipped.  Where it cannot, for one step or for all, DeepSpeed copies as ever.

ZeRO 1 and 2 copy to a buffer in host memory, and from there to the model's weights.  The buffer is
replaced where that saves its 2 bytes per parameter: without a GPU by the weights themselves, for
torch skips a copy of memory onto itself; else by master weights that are bfloat16 already.
"""

import functools
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.weak import WeakTensorKeyDictionary

from zero8.op.kernel import COPY_DTYPES
from zero8.zero.sharing import are_alike
from zero8.zero.stand_in import StandIn

STEPS = "_optimizer_step"
REASSIGNS = "_reassign_or_swap_out_partitioned_parameters"
BUFFERS = "param_buffer_of_bit16_for_cpu_offload_groups"
WEIGHTS = "parallel_partitioned_bit16_groups"


class CopyTarget(torch.Tensor):
    """A buffer that skips one copy of the weights that a step has already written to it.

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


class _Copies:
    """Which partitions' copies the step may write, and which it has written."""

    def __init__(self) -> None:
        self._noted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def step(self, optimizer: Any, p: Tensor, target: Tensor | None, step: Any) -> bool:
        """Call `step`; return whether it has written the copy of a partition to `target`.

        The elements between parameters, which no step touches, are copied by DeepSpeed once; if
        another than our steps has written to the partition since, again.
        """
        if target is None or not _can_write(optimizer, p, target):
            step()
            return False
        expected = target.data_ptr(), p._version
        if self._noted.get(p) == expected:
            optimizer.copies[p] = target
        try:
            step()
            is_written = self._noted.get(p) == expected and p not in optimizer.copies
        finally:
            optimizer.copies.clear()
        self._noted[p] = target.data_ptr(), p._version
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


def write_in_step(stage12_class: type, stage3_class: type, optimizer_class: type) -> None:
    """Have the steps of our optimizer write the copies of these classes."""
    _write_in_stage12(stage12_class, optimizer_class)
    _write_in_stage3(stage3_class, optimizer_class)


def _write_in_stage12(zero_class: type, optimizer_class: type) -> None:
    step, copies = getattr(zero_class, STEPS), _Copies()

    @functools.wraps(step)
    def in_stage12(self: Any, group_no: int) -> None:
        if not (
            type(self) is zero_class
            and isinstance(self.optimizer, optimizer_class)
            and self.cpu_offload
        ):
            step(self, group_no)
            return
        p, buffers = self.single_partition_of_fp32_groups[group_no], getattr(self, BUFFERS)
        if hasattr(buffers[group_no], "ds_pin_base"):
            # DeepSpeed frees such page-locked memory with this very object.
            step(self, group_no)
            return
        buffers[group_no] = target = _buffer(p, buffers[group_no], _weights(self, group_no))
        is_written = copies.step(self.optimizer, p, target, lambda: step(self, group_no))
        if isinstance(target, CopyTarget):
            target.written_from = p.data_ptr() if is_written else None

    setattr(zero_class, STEPS, in_stage12)


def _weights(zero: Any, group_no: int) -> Tensor:
    """Return this rank's partition of the model's weights."""
    rank = torch.distributed.get_rank(zero.real_dp_process_group[group_no])
    weights: Tensor = getattr(zero, WEIGHTS)[group_no][rank]
    return weights


def _buffer(p: Tensor, buffer: Tensor, weights: Tensor) -> Tensor:
    """Return what to copy the master weights to instead of DeepSpeed's buffer, or that."""
    if are_alike(weights, buffer):
        return weights.detach().as_subclass(CopyTarget)
    if are_alike(p, buffer):
        return p.data
    return buffer if isinstance(buffer, CopyTarget) else buffer.as_subclass(CopyTarget)


def _write_in_stage3(zero_class: type, optimizer_class: type) -> None:
    step, reassign = getattr(zero_class, STEPS), getattr(zero_class, REASSIGNS)
    copies = _Copies()
    written: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()

    @functools.wraps(step)
    def in_stage3(self: Any, sub_group_id: int) -> None:
        if not (type(self) is zero_class and isinstance(self.optimizer, optimizer_class)):
            step(self, sub_group_id)
            return
        p = self.fp32_partitioned_groups_flat[sub_group_id]
        target = self.fp16_partitioned_groups_flat[sub_group_id]
        mine = written.setdefault(self, set())
        mine.discard(sub_group_id)
        if copies.step(self.optimizer, p, target, lambda: step(self, sub_group_id)):
            mine.add(sub_group_id)

    @functools.wraps(reassign)
    def reassign_in_stage3(self: Any, sub_group_id: int) -> None:
        # The patch for a class that this optimizer's derives from may call this one.
        zero = self.original if isinstance(self, StandIn) else self
        if sub_group_id in written.get(zero, ()):
            written[zero].remove(sub_group_id)
            copied = SimpleNamespace(data=SimpleNamespace(copy_=lambda weights: None))
            self = StandIn(zero, fp16_partitioned_groups_flat={sub_group_id: copied})
        reassign(self, sub_group_id)

    setattr(zero_class, STEPS, in_stage3)
    setattr(zero_class, REASSIGNS, reassign_in_stage3)
