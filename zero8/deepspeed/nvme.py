# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 with the optimizer on a local disk: `"offload_optimizer": {"device": "nvme"}`.

DeepSpeed swaps float tensors between files and buffers in memory.  Here master weights, states and
gradients of several micro-batches are tensors in mapped files of `nvme_path`, and the engine works
as with `"device": "cpu"`: it makes the same bits and the same checkpoints.  While it steps, a
sub-group is in memory (`zero8.deepspeed.streaming`).  The section "aio" and the settings of
DeepSpeed's buffers and pipelines have no effect.

The files have no names: jobs may share a folder, and none is left behind.  All of them are made, at
their full sizes, before the first step.  A disk that fails later ends the process.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from zero8.deepspeed.seam import ENGINE, STAGE3, rely_on, replaced, seam
from zero8.deepspeed.streaming import Stream, SubGroup
from zero8.environment import ranks
from zero8.environment.ranks import raise_together
from zero8.files.scratch import mapped_tensor
from zero8.state.tell import tell_once


class Disk(NamedTuple):
    """The folder of an optimizer's files, and what reads and writes them."""

    folder: Path
    stream: Stream


_disks: "WeakKeyDictionary[Any, Disk]" = WeakKeyDictionary()
"""By optimizer of ZeRO-3 on a disk."""
_homes = WeakTensorKeyDictionary()
"""By partition, its tensor in a file, and the folder of the file."""
_SWAPS = "master weights and states would be swapped as floats"

rely_on(STAGE3, "_swap_in_sub_group_to_flat_buffer", "flat_buffer", "sub_group_id")


@seam(STAGE3, "_configure_offloading", _SWAPS, "offload_optimizer_config", "offload_param_config")
def configure(original: Callable, zero: Any, offload_optimizer_config: Any, *args: Any) -> None:
    """Have ZeRO-3 work as with the optimizer in host memory."""
    original(zero, offload_optimizer_config, *args)
    if zero.swap_optimizer:
        zero.swap_optimizer = False
        _disks[zero] = Disk(Path(offload_optimizer_config.nvme_path), Stream())


def make_masters(zero: Any, original: Callable) -> None:
    """Make the master weights: in host memory by DeepSpeed's `original`, or on a disk here.

    Raises OSError on all ranks, if the disk of one has no room.
    """
    if zero not in _disks:
        original(zero)
        return
    zero.subgroup_to_device = dict.fromkeys(range(len(zero.fp16_groups)), "cpu")
    _on_all(partial(_make_masters, zero), "master weights")
    for group in zero.optimizer.param_groups:
        group["params"] = []


def _make_masters(zero: Any) -> None:
    folder = _disks[zero].folder
    folder.mkdir(parents=True, exist_ok=True)
    for number, weights in enumerate(zero.fp16_partitioned_groups_flat):
        numel = zero.fp16_partitioned_groups_flat_numel[number]
        home = mapped_tensor(folder, (numel,), zero.master_weights_and_grads_dtype)
        if weights is None:  # they are in files of `offload_param`
            zero._swap_in_sub_group_to_flat_buffer(home, number)
        else:
            home.copy_(weights)
        p = home.detach().requires_grad_()
        _homes[p] = home, folder
        zero.fp32_partitioned_groups_flat.append(p)


def beside(p: Tensor, x: Tensor) -> Tensor:
    """Return a new tensor that belongs to a partition in a mapped file, if that is in one."""
    if not is_on_disk(p):
        return x
    _, folder = _homes[p]
    return mapped_tensor(folder, x.shape, x.dtype).copy_(x)


def is_on_disk(p: Tensor) -> bool:
    """Return whether a partition is in a mapped file."""
    return p in _homes


@seam(STAGE3, "initialize_optimizer_states", "gradients that are replaced would be page-locked")
def initialize(original: Callable, zero: Any) -> None:
    """Have DeepSpeed make gradients that take no memory until they are replaced."""
    locks = zero.offload_optimizer_pin_memory and zero not in _disks
    with replaced(zero, "offload_optimizer_pin_memory", locks):
        original(zero)


@seam(
    ENGINE,
    "_configure_zero_optimizer",
    "a full disk would end a training in the middle",
    "optimizer",
    optimizer=lambda _, optimizer: optimizer,
)
def make_states(original: Callable, engine: Any, optimizer: Any) -> Any:
    """Make all states on a disk, so that a full one raises OSError on all ranks before a step."""
    zero = original(engine, optimizer)
    if zero in _disks:
        if ranks.rank() == 0:
            tell_once(
                f"zero8: the optimizer is in files in {_disks[zero].folder}; aio, buffer_count "
                "and the pipelines of DeepSpeed's swappers have no effect"
            )
        _on_all(partial(_make_states, zero), "optimizer states")
    return zero


def _make_states(zero: Any) -> None:
    optimizer = zero.optimizer
    for number, p in enumerate(zero.fp32_partitioned_groups_flat):
        group = optimizer.param_groups[zero.sub_group_to_group_id[number]]
        kind = optimizer.kind_of(p, {}, optimizer.algorithm_of(group))
        state = kind.new(p, None)
        if kind.settings.corrects(p):
            correction = torch.zeros(p.shape, dtype=torch.int8, device="cpu")
            state["param_correction"] = beside(p, correction)
        optimizer.state[p].update(state)


def _on_all(make: Callable[[], None], what: str) -> None:
    error = None
    try:
        make()
    except OSError as caught:
        error = caught
    raise_together(error, f"make files of {what}")


# --- Steps ---------------------------------------------------------------------------------------

_FAULTS = "a step would wait for the disk at every page"


@seam(STAGE3, "_prepare_sub_group", _FAULTS)
def prepare(original: Callable, zero: Any, sub_group_id: int, *args: Any) -> None:
    """Have a sub-group in memory, and begin to read the next one."""
    if disk := _disks.get(zero):
        partitions = zero.fp32_partitioned_groups_flat[sub_group_id : sub_group_id + 2]
        here, *after = [SubGroup(p, _homes[p][0], zero.optimizer.state[p]) for p in partitions]
        disk.stream.take(sub_group_id, here)
        for sub_group in after:
            disk.stream.read_ahead(sub_group_id + 1, sub_group)
    original(zero, sub_group_id, *args)


@seam(STAGE3, "_release_sub_group", _FAULTS)
def release(original: Callable, zero: Any, sub_group_id: int, *args: Any) -> None:
    """Begin to write a sub-group."""
    if disk := _disks.get(zero):
        disk.stream.give_back(sub_group_id)
    original(zero, sub_group_id, *args)


@seam(STAGE3, "reset_cpu_buffers", "files would be read before they are written")
@seam(STAGE3, "backward_prologue", "what was read for a step that has failed would be stale")
def wait(original: Callable, zero: Any) -> None:
    """Wait for all transfers at the end of a step, and after one that has failed."""
    if disk := _disks.get(zero):
        disk.stream.wait()
    original(zero)
