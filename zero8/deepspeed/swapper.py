# SPDX-License-Identifier: Apache-2.0
"""Optimizer states of ZeRO-3 on a local disk, beside DeepSpeed's swappers.

DeepSpeed's assume that every state tensor has the master weights' dtype and length, so they cannot
carry codes.  These leave master weights and gradients to DeepSpeed, and keep the state of each
sub-group in a file of its own (`zero8.deepspeed.swap_file`), which is read and written through the
page cache: the kernel reads ahead, and writes back while the optimizer steps other sub-groups.
Between a swap-out and the next swap-in `optimizer.state` has only entries of other code.
"""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper
from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper
from torch import Tensor

from zero8.deepspeed import swap_file
from zero8.deepspeed.flat_state import FlatPartition
from zero8.deepspeed.moment_tensor import MomentTensor, moments_in
from zero8.deepspeed.seam import overrides
from zero8.environment.agree import raise_together, raise_together_quickly
from zero8.spec.algorithms import algorithm_called
from zero8.state.entries import is_new, others_in
from zero8.state.memory import new_memory
from zero8.state.store import MomentStore
from zero8.state.table import PieceTable

_SWAP = "deepspeed.runtime.swap_tensor"
SWAPPER = f"{_SWAP}.optimizer_utils:OptimizerSwapper"
PARTITIONED = f"{_SWAP}.partitioned_optimizer_swapper:PartitionedOptimizerSwapper"
PIPELINED = f"{_SWAP}.pipelined_optimizer_swapper:PipelinedOptimizerSwapper"


class ReservingHandle:
    """DeepSpeed's aio handle, which tells nobody of a full disk: blocks are allocated before."""

    def __init__(self, handle):
        """Wrap a handle that has no transfer under way."""
        self._handle, self._pending = handle, 0

    def __getattr__(self, name: str):
        """Forward other attributes."""
        return getattr(self._handle, name)

    def async_pread(self, *args):
        """Begin to read."""
        failed = self._handle.async_pread(*args)
        self._pending += not failed
        return failed

    def async_pwrite(self, buffer: Tensor, path: str, offset: int):
        """Begin to write; raise OSError if the disk is full."""
        swap_file.reserve(path, offset + buffer.nbytes)
        failed = self._handle.async_pwrite(buffer, path, offset)
        self._pending += not failed
        return failed

    def wait(self) -> int:
        """Wait for all transfers begun, and return their number."""
        self._pending = 0
        return self._handle.wait()

    def drain(self) -> None:
        """Wait for them, if any: the process crashes if a handle is destroyed with some."""
        if self._pending:
            self.wait()


class OnDisk(NamedTuple):
    """What the optimizer knows of a state that is swapped out."""

    like: tuple[MomentStore, ...]  # on the meta device
    correction_numel: int

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "OnDisk":
        """Return the description of a state."""
        like = [x.store.with_buffers(lambda t: t.to("meta")) for x in moments_in(state).values()]
        correction = state.get("param_correction")
        return cls(tuple(like), 0 if correction is None else correction.numel())


class SwapsStates(OptimizerSwapper):
    """What both swappers do for states."""

    has_agreed = False  # whether the other ranks know already why a step raises
    _in_step = False

    def __init__(self, **kwargs):
        """Take DeepSpeed's arguments; raise OSError on all ranks if one's folder is in use."""
        super().__init__(**kwargs)
        names = [name for name in vars(self) if name.endswith("aio_handle")]
        self._handles = {id(one): ReservingHandle(one) for one in map(vars(self).get, names)}
        for name in names:
            setattr(self, name, self._handles[id(getattr(self, name))])
        self.gradient_swapper.aio_handle = self.aio_handle
        error = None
        try:
            swap_file.lock(self.swap_folder)
        except OSError as caught:
            error = caught
        raise_together(error, "keep optimizer states on NVMe")
        for kind in self.kinds:
            kind.before_exchange = self.agree
        # What was last written to each file; None: files of a checkpoint, whatever they are.
        self._written: dict[str, swap_file.Mark | None] = {}

    def state_path(self, parameter: Tensor, folder: str | None = None) -> str:
        """Return the name of the file of a sub-group's state."""
        return os.path.join(folder or self.swap_folder, f"zero8-{parameter.ds_id}.tensor.swp")

    def weights_file(self, parameter: Tensor, folder: str) -> tuple[str, int]:
        """Return DeepSpeed's file of a sub-group's master weights in a folder, and its size."""
        info = self.swap_params_info[parameter.ds_id]
        (weights, *_) = info.get_swap_paths()
        size = self._io_aligned_numel(info.numel()) * self.swap_element_size
        return os.path.join(folder, os.path.basename(weights)), size

    def table(self, parameter: Tensor) -> PieceTable:
        """Return the segment table of a sub-group, which may be swapped out."""
        return self.kinds[0].table(parameter, self.swap_params_info[parameter.ds_id].numel())

    def begin(self, parameter: Tensor) -> None:
        """Write the state of a sub-group before its first step, over any file of an earlier run."""
        self._set_dtype(parameter)
        table = self.table(parameter)
        group = self.optimizer.param_groups[self.kinds[0].group_number(parameter)]
        algorithm = self.optimizer.algorithm_of(group)
        settings = next(kind.settings for kind in self.kinds if kind.algorithm is algorithm)
        stores = [MomentStore.zeros(settings.codec, rule, table) for rule in algorithm.moments]
        state = {"step": 0, **new_memory(algorithm)}
        state |= {store.name: MomentTensor(store) for store in stores}
        if settings.corrects(parameter):
            state["param_correction"] = torch.zeros(table.numel, dtype=torch.int8, device="cpu")
        self._save(parameter, state)

    @property
    def kinds(self) -> list[FlatPartition]:
        """The optimizer's kinds of state for ZeRO partitions, one per algorithm."""
        return [kind for kind in self.optimizer.kinds if isinstance(kind, FlatPartition)]

    def agree(self) -> None:
        """Raise OSError on all ranks if one of them could not swap.

        Ranks call it before they wait for each other in a step; one that could not swap meets
        them in `swapping.step`.
        """
        self.raise_on_all(None)
        self.has_agreed = False

    def raise_on_all(self, error: Exception | None) -> None:
        """Raise on all ranks if one could not swap, its `error` on this one."""
        self.has_agreed = True
        raise_together_quickly(error, "swap its optimizer states during a step")

    def drain(self) -> None:
        """Wait for all transfers that are under way."""
        for handle in self._handles.values():
            handle.drain()

    def _save(self, parameter: Tensor, state: dict[str, Any]) -> None:
        self._written[parameter.ds_id] = swap_file.save(self.state_path(parameter), state)

    def expect_other_files(self) -> None:
        """Accept files that this run did not write, such as a checkpoint's."""
        self._written = dict.fromkeys(self._written)
        self.optimizer.weight_sums.forget()

    def _set_dtype(self, parameter: Tensor) -> None:
        # DeepSpeed leaves an empty float32 tensor for released weights, but relies on their dtype.
        if parameter.dtype != self.dtype:
            parameter.data = torch.empty(0, dtype=self.dtype, device=parameter.device)

    def _read(self, parameter: Tensor) -> None:
        """Give the optimizer the state in the file, unless `load_state_dict` has set one."""
        if parameter.ds_id not in self._written:
            return  # DeepSpeed is still making its optimizer
        if not is_new(self.optimizer.state.get(parameter, {})):
            return
        mark = self._written[parameter.ds_id]
        state = swap_file.load(self.state_path(parameter), mark)
        if mark is None:  # codec, block size or policy may differ from ours
            state = self.optimizer.adopted(parameter, state, None)
        elif "param_correction" in state:
            self.optimizer.weight_sums.moved(parameter, state["param_correction"])
        self.optimizer.state[parameter].update(state)
        self.optimizer.on_disk.pop(parameter, None)

    def _write(self, parameter: Tensor) -> None:
        """Write the state that the optimizer has, if any, or that before the first step."""
        if parameter.ds_id not in self._written:
            return
        state = self.optimizer.state.get(parameter, {})
        if is_new(state):
            self.begin(parameter)
            return
        kind = self.optimizer.kind_of(parameter, state)
        # Encodes moments that were loaded in float32, and resets the memory of written ones.
        kind.moments(parameter, state, None)
        others = others_in(state, kind.algorithm)
        ours = {key: value for key, value in state.items() if key not in others}
        self._save(parameter, ours)

    def _forget(self, parameter: Tensor) -> None:
        """Drop a state from memory; changes since the last swap-out are lost."""
        state = self.optimizer.state.pop(parameter, {})
        if not is_new(state):
            self.optimizer.on_disk[parameter] = found = OnDisk.of(state)
            state = others_in(state, algorithm_called(found.like[0].rule.algorithm))
        if state:
            self.optimizer.state[parameter] = state

    # --- In DeepSpeed's place --------------------------------------------------------------------

    @overrides(PARTITIONED)
    @overrides(PIPELINED)
    def swap_in_optimizer_state(self, parameter, async_parameter=None):
        """Read a sub-group's weights, gradients and state, and begin to read another's."""
        self._in_step = async_parameter is not None
        self._set_dtype(parameter)
        if async_parameter is not None:
            self._set_dtype(async_parameter)
            swap_file.will_need(self.state_path(async_parameter))
        super().swap_in_optimizer_state(parameter, async_parameter)
        self._read(parameter)

    @overrides(PARTITIONED)
    @overrides(PIPELINED)
    def swap_out_optimizer_state(self, parameter, async_swap=False):
        """Write a sub-group's weights and state; within a step, asynchronously."""
        self._write(parameter)
        # Outside of a step nothing would wait for the write before the file is read.
        super().swap_out_optimizer_state(parameter, async_swap and self._in_step)
        self.swap_params_info[parameter.ds_id].release_memory()
        self._forget(parameter)

    @overrides(PARTITIONED)
    @overrides(PIPELINED)
    def writeback_optimizer_state_and_gradients(self, parameter, write_opt_state, write_gradients):
        """Write the state or gradients, and release a sub-group's memory."""
        if write_opt_state:
            self._write(parameter)
        super().writeback_optimizer_state_and_gradients(parameter, write_opt_state, write_gradients)
        self._forget(parameter)

    @overrides(PARTITIONED)
    @overrides(PIPELINED)
    def release_swap_buffers(self, parameter):
        """Release a sub-group's memory; changes since the last swap-out are lost."""
        super().release_swap_buffers(parameter)
        self._forget(parameter)

    @overrides(SWAPPER)
    def _get_state_tensors(self, parameter):
        return []  # DeepSpeed shall write no files for states

    @overrides(SWAPPER)
    def _adjust_for_misaligned_lengths(self, tensors, offsets):
        # DeepSpeed cuts off a partial sector at the end, but not at the beginning.
        parts: list[tuple[Tensor, int]] = []
        for tensor, offset in zip(tensors, offsets, strict=True):
            head = min(-offset % self.numel_alignment, tensor.numel())
            if head:
                parts.append((tensor[:head], offset))
            if head < tensor.numel():
                parts.append((tensor[head:], offset + head))
        cut, offsets = super()._adjust_for_misaligned_lengths(
            [tensor for tensor, _ in parts], [offset for _, offset in parts]
        )
        # Parts too small for a file are kept in memory until the step: clones, not views.
        return [t if self.is_swappable_tensor(tensor=t) else t.clone() for t in cut], offsets


OURS = {
    theirs: type(f"Swaps8bit{theirs.__name__}", (SwapsStates, theirs), {})
    for theirs in (PartitionedOptimizerSwapper, PipelinedOptimizerSwapper)
}
"""Our swappers, by DeepSpeed's in whose place they are made."""
