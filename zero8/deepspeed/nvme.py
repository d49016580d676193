# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 with the optimizer on a local disk: `"offload_optimizer": {"device": "nvme"}`.

DeepSpeed swaps float tensors between files and buffers in memory.  Here master weights, states and
gradients of several micro-batches are tensors in mapped files of `nvme_path`, and the engine works
as with `"device": "cpu"`: it makes the same bits and the same checkpoints.  The system reads a
sub-group ahead while the one before it steps, keeps in memory what has room there, and writes the
rest back.  The section "aio" and the settings of DeepSpeed's buffers and pipelines have no effect.

The files have no names: jobs may share a folder, and none is left behind.  All of them are made, at
their full sizes, before the first step.  A disk that fails to read a page later ends the process by
SIGBUS.
"""

import mmap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zero8.deepspeed.moment_tensor import MomentTensor
from zero8.deepspeed.seam import ENGINE, STAGE3, rely_on, replaced, seam
from zero8.environment import numbers
from zero8.environment.agree import raise_together
from zero8.environment.pages import advise
from zero8.files.scratch import mapped_tensor
from zero8.state.tell import tell_once

_folders: "WeakKeyDictionary[Any, Path]" = WeakKeyDictionary()
"""By optimizer of ZeRO-3 on a disk, the folder of its files."""
_SWAPS = "master weights and states would be swapped as floats"

rely_on(STAGE3, "_swap_in_sub_group_to_flat_buffer", "flat_buffer", "sub_group_id")


@seam(STAGE3, "_configure_offloading", _SWAPS, "offload_optimizer_config", "offload_param_config")
def configure(original: Callable, zero: Any, offload_optimizer_config: Any, *args: Any) -> None:
    """Have ZeRO-3 work as with the optimizer in host memory."""
    original(zero, offload_optimizer_config, *args)
    if zero.swap_optimizer:
        zero.swap_optimizer = False
        _folders[zero] = Path(offload_optimizer_config.nvme_path)


def make_masters(zero: Any, original: Callable) -> None:
    """Make the master weights: in host memory by DeepSpeed's `original`, or on a disk here.

    Raises OSError on all ranks, if the disk of one has no room.
    """
    if zero not in _folders:
        original(zero)
        return
    zero.subgroup_to_device = dict.fromkeys(range(len(zero.fp16_groups)), "cpu")
    _on_all(partial(_make_masters, zero), "master weights")
    for group in zero.optimizer.param_groups:
        group["params"] = []


def _make_masters(zero: Any) -> None:
    _folders[zero].mkdir(parents=True, exist_ok=True)
    for number, weights in enumerate(zero.fp16_partitioned_groups_flat):
        numel = zero.fp16_partitioned_groups_flat_numel[number]
        p = mapped_tensor(_folders[zero], (numel,), zero.master_weights_and_grads_dtype)
        if weights is None:  # they are in files of `offload_param`
            zero._swap_in_sub_group_to_flat_buffer(p, number)
        else:
            p.copy_(weights)
        p.nvme_folder = _folders[zero]
        zero.fp32_partitioned_groups_flat.append(p.requires_grad_())


def beside(p: Tensor, x: Tensor) -> Tensor:
    """Return a new tensor that belongs to a partition in a mapped file, if that is in one."""
    folder = getattr(p, "nvme_folder", None)
    return x if folder is None else mapped_tensor(folder, x.shape, x.dtype).copy_(x)


def is_on_disk(p: Tensor) -> bool:
    """Return whether a partition is in a mapped file."""
    return hasattr(p, "nvme_folder")


@seam(STAGE3, "initialize_optimizer_states", "gradients that are replaced would be page-locked")
def initialize(original: Callable, zero: Any) -> None:
    """Have DeepSpeed make gradients that take no memory until they are replaced."""
    locks = zero.offload_optimizer_pin_memory and zero not in _folders
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
    if zero in _folders:
        if numbers.rank() == 0:
            tell_once(
                f"zero8: the optimizer is in mapped files in {_folders[zero]}; aio, buffer_count "
                "and the pipelines of DeepSpeed's swappers have no effect"
            )
        _on_all(partial(_make_states, zero), "optimizer states")
    return zero


def _make_states(zero: Any) -> None:
    optimizer = zero.optimizer
    for number, p in enumerate(zero.fp32_partitioned_groups_flat):
        group = optimizer.param_groups[zero.sub_group_to_group_id[number]]
        kind = optimizer.kind_of(p, {}, group)
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
    raise_together(error, f"making files of {what}")


@seam(STAGE3, "_prepare_sub_group", "a step would wait for the disk at every page")
def read_ahead(original: Callable, zero: Any, sub_group_id: int, *args: Any) -> None:
    """Have the system begin to read the sub-group after the one that steps next."""
    if zero in _folders:
        for p in zero.fp32_partitioned_groups_flat[sub_group_id + 1 :][:1]:
            for x in (p, *_tensors_of(zero.optimizer.state.get(p, {}))):
                advise(x.data_ptr(), x.nbytes, mmap.MADV_WILLNEED)
    original(zero, sub_group_id, *args)


def _tensors_of(state: dict) -> Iterator[Tensor]:
    for value in state.values():
        if isinstance(value, MomentTensor):
            yield from value.store.buffers
        elif isinstance(value, Tensor):
            yield value
