# SPDX-License-Identifier: Apache-2.0
"""Optimizer states of ZeRO-3 on a local disk: DeepSpeed's swappers, for 8-bit states.

DeepSpeed's own assume that every state tensor has the master weights' dtype and length, so they
cannot carry codes.  These leave master weights and gradients to DeepSpeed and keep the whole state
of a sub-group in one file (`zero8.deepspeed.swap_file`).  They use DeepSpeed's aio handles, and
swap one sub-group at a time or in a pipeline, as DeepSpeed does.  Between a swap-out and the next
swap-in `optimizer.state` has only entries of other code: another sub-group may use the page-locked
buffer.
"""

import os
import weakref

import torch
from deepspeed.runtime.swap_tensor.optimizer_utils import OptimizerSwapper
from deepspeed.runtime.swap_tensor.partitioned_optimizer_swapper import PartitionedOptimizerSwapper
from deepspeed.runtime.swap_tensor.pipelined_optimizer_swapper import PipelinedOptimizerSwapper
from torch import Tensor

from zero8.deepspeed import swap_file, swap_io
from zero8.deepspeed.flat_state import FlatPartition
from zero8.deepspeed.moment_tensor import moments_in
from zero8.deepspeed.seam import overrides
from zero8.deepspeed.swap_file import BLOCK_BYTES, Layout, SwapHeader
from zero8.deepspeed.swap_io import Buffer, BufferPool, CheckedHandle
from zero8.environment.agree import raise_together, raise_together_quickly
from zero8.state.entries import is_new, others_in

_SWAP = "deepspeed.runtime.swap_tensor"
SWAPPER = f"{_SWAP}.optimizer_utils:OptimizerSwapper"
PARTITIONED = f"{_SWAP}.partitioned_optimizer_swapper:PartitionedOptimizerSwapper"
PIPELINED = f"{_SWAP}.pipelined_optimizer_swapper:PipelinedOptimizerSwapper"


class SwapsStates(OptimizerSwapper):
    """The part that both swappers share.

    A state is in its file; or being read into a buffer (`_arriving`); or in `optimizer.state`, in a
    buffer (`_resident`) or, before its first swap-out, in memory of its own.
    """

    has_agreed = False  # whether the other ranks know already why a step raises

    def _begin(self) -> None:
        """Finish the constructor; raise OSError on all ranks if another process has a folder."""
        error = None
        try:
            swap_io.lock(self.swap_folder)
        except OSError as caught:
            error = caught
        raise_together(error, "keep optimizer states on NVMe")
        for kind in self.kinds:
            kind.before_exchange = self.agree
        parallelism = self.aio_config["intra_op_parallelism"]
        self._alignment_bytes = BLOCK_BYTES * parallelism
        self._pool = BufferPool(self.aio_handle)
        self._layouts: dict[str, Layout] = {}
        self._arriving: dict[str, tuple[Buffer, Tensor]] = {}
        self._resident: dict[str, Buffer] = {}
        self._written: dict[str, SwapHeader] = {}  # the header last written to each file
        self.print_exclude_list += ["_pool", "_layouts", "_arriving", "_resident", "_written"]

    def state_path(self, parameter: Tensor, folder: str | None = None) -> str:
        """Return the name of the file of a sub-group's state."""
        return os.path.join(folder or self.swap_folder, f"zero8-{parameter.ds_id}.tensor.swp")

    def weights_file(self, parameter: Tensor, folder: str) -> tuple[str, int]:
        """Return DeepSpeed's file of a sub-group's master weights in a folder, and its size."""
        info = self.swap_params_info[parameter.ds_id]
        (weights, *_) = info.get_swap_paths()
        size = self._io_aligned_numel(info.numel()) * self.swap_element_size
        return os.path.join(folder, os.path.basename(weights)), size

    def planned_layout(self, parameter: Tensor) -> Layout:
        """Return the layout that the file of a sub-group's state will have."""
        self._set_dtype(parameter)
        numel = self.swap_params_info[parameter.ds_id].numel()
        kind = self._kind_of(parameter)
        table, settings = kind.table(parameter, numel), kind.settings
        correction_numel = numel if settings.corrects(parameter) else 0
        return Layout(kind.algorithm, settings.codec, table, correction_numel)

    def _kind_of(self, parameter: Tensor) -> FlatPartition:
        """Return the kind of a sub-group's state, which may be swapped out."""
        group = self.optimizer.param_groups[self.kinds[0].group_number(parameter)]
        algorithm = self.optimizer.algorithm_of(group)
        return next(kind for kind in self.kinds if kind.algorithm is algorithm)

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

    def reserve(self, parameter: Tensor) -> None:
        """Reserve the disk space for a sub-group's state, and size the buffers for it."""
        num_bytes = self.planned_layout(parameter).file_bytes(self._alignment_bytes)
        swap_io.reserve(self.state_path(parameter), num_bytes)
        self._pool.size_bytes = max(self._pool.size_bytes, num_bytes)

    @overrides(SWAPPER)
    def _create_param_swap_info(self, parameter, numel):
        self._write_empty(parameter)  # over a file of an earlier run
        return super()._create_param_swap_info(parameter, numel)

    def _write_empty(self, parameter: Tensor) -> None:
        path = self.state_path(parameter)
        self._written[parameter.ds_id] = swap_file.write_empty(path, self._alignment_bytes)

    def expect_other_files(self) -> None:
        """Accept files that this run did not write, such as a checkpoint's."""
        self._written.clear()
        self.optimizer.weight_sums.forget()

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

    def _is_swapped(self, parameter: Tensor) -> bool:
        return parameter.ds_id in self.swap_params_info

    def _set_dtype(self, parameter: Tensor) -> None:
        # DeepSpeed leaves an empty float32 tensor for released weights, but relies on their dtype.
        if parameter.dtype != self.dtype:
            parameter.data = torch.empty(0, dtype=self.dtype, device=parameter.device)

    # --- In --------------------------------------------------------------------------------------

    def _begin_read(self, handle, parameter: Tensor) -> int:
        """Begin to read a state, and return the number of transfers begun."""
        path = self.state_path(parameter)
        if not is_new(self.optimizer.state.get(parameter, {})):
            return 0  # load_state_dict has set it; it is newer than the file
        size = os.stat(path).st_size
        if not size or size % self._alignment_bytes:
            raise ValueError(
                f"{path}: got {size} bytes, expected a multiple of {self._alignment_bytes}; it was "
                'cut short, or written with another "intra_op_parallelism"'
            )
        buffer = self._pool.take(size)
        self._arriving[parameter.ds_id] = buffer, buffer.memory[:size]
        handle.async_pread(buffer.memory[:size], path, 0)
        return 1

    def _install(self, parameter: Tensor) -> None:
        """Give the optimizer the state that was read."""
        key, path = parameter.ds_id, self.state_path(parameter)
        if key not in self._arriving:
            return
        buffer, memory = self._arriving.pop(key)
        known = self._layouts.get(key)
        found = None
        try:
            found = swap_file.unpack(memory, path, known, self._written.get(key))
        finally:
            if found is None:
                self._pool.give_back(buffer)
        if found is None:
            return
        state, layout = found
        buffer.users += [weakref.ref(moment.store) for moment in moments_in(state).values()]
        if layout is known:
            self._resident[key] = buffer
            if layout.correction_numel:
                self.optimizer.weight_sums.moved(parameter, state["param_correction"])
            self._hand_over(parameter, state)
            return
        # A checkpoint's file: codec, block size or policy may differ from ours.
        state = self.optimizer.adopted(parameter, state, None)
        self._layouts[key] = Layout.of_state(state)
        self._hand_over(parameter, state)
        self._pool.give_back(buffer)

    def _hand_over(self, parameter: Tensor, state: dict) -> None:
        self.optimizer.state[parameter].update(state)
        self.optimizer.on_disk.pop(parameter, None)

    # --- Out -------------------------------------------------------------------------------------

    def _begin_write(self, handle, parameter: Tensor) -> int:
        """Begin to write a state from its buffer, and return the number of transfers begun."""
        key, path = parameter.ds_id, self.state_path(parameter)
        state = self.optimizer.state.get(parameter, {})
        if is_new(state):
            self._write_empty(parameter)
            self.optimizer.on_disk.pop(parameter, None)
            return 0
        kind = self.optimizer.kind_of(parameter, state)
        # Encodes moments that were loaded in float32, and resets the memory of written ones.
        kind.moments(parameter, state, None)
        layout, left = self._layouts.get(key), None
        if layout != (found := Layout.of_state(state)):
            layout = self._layouts[key] = found
            left = self._resident.pop(key, None)
        size = layout.file_bytes(self._alignment_bytes)
        if key not in self._resident:
            self._resident[key] = self._pool.take(size)
        memory = self._resident[key].memory[:size]
        self._written[key] = swap_file.pack(state, layout, memory)
        if left is not None:
            self._pool.give_back(left)
        if os.stat(path).st_size > size:
            os.truncate(path, size)
        handle.async_pwrite(memory, path, 0)
        return 1

    def _forget(self, parameter: Tensor) -> Buffer | None:
        """Drop a state from memory; return its buffer, which a write may still be using."""
        state = self.optimizer.state.pop(parameter, {})
        if not is_new(state):
            self.optimizer.on_disk[parameter] = layout = self._layouts[parameter.ds_id]
            state = others_in(state, layout.algorithm)
        if state:
            self.optimizer.state[parameter] = state
        return self._resident.pop(parameter.ds_id, None)

    @overrides(PARTITIONED)
    @overrides(PIPELINED)
    def release_swap_buffers(self, parameter):
        """Release a sub-group's memory; changes since the last swap-out are lost."""
        super().release_swap_buffers(parameter)
        if self._is_swapped(parameter):
            self._release(parameter)

    def _release(self, parameter: Tensor) -> None:
        buffer = self._forget(parameter)
        if buffer is not None:
            self._pool.give_back(buffer)


class PartitionedSwapper(SwapsStates, PartitionedOptimizerSwapper):
    """Swaps one sub-group at a time: in, step, out."""

    def __init__(self, **kwargs):
        """Take the arguments of DeepSpeed's swapper."""
        super().__init__(**kwargs)
        self.aio_handle = CheckedHandle(self.aio_handle)
        self.gradient_swapper.aio_handle = self.aio_handle
        self._begin()

    @overrides(PARTITIONED)
    def swap_in_optimizer_state(self, parameter, async_parameter=None):
        """Read weights, gradients and state of a sub-group."""
        if self._is_swapped(parameter):
            self._set_dtype(parameter)
        super().swap_in_optimizer_state(parameter, async_parameter)

    @overrides(PARTITIONED)
    def _swap_in_parameter(self, aio_handle, parameter, dest_buffers):
        self._begin_read(aio_handle, parameter)
        super()._swap_in_parameter(aio_handle, parameter, dest_buffers)  # waits for both
        self._install(parameter)

    @overrides(PARTITIONED)
    def _swap_out_optimizer_state(self, swap_info):
        super()._swap_out_optimizer_state(swap_info)
        if self._begin_write(self.aio_handle, swap_info.tensors[0].compute_tensor):
            self.aio_handle.wait()


class PipelinedSwapper(SwapsStates, PipelinedOptimizerSwapper):
    """Reads the next sub-group and writes the previous one while the optimizer steps one."""

    def __init__(self, **kwargs):
        """Take the arguments of DeepSpeed's swapper."""
        super().__init__(**kwargs)
        self.read_aio_handle = CheckedHandle(self.read_aio_handle)
        self.write_aio_handle = CheckedHandle(self.write_aio_handle)
        self.aio_handle = self.gradient_swapper.aio_handle = self.write_aio_handle
        self._in_step = False
        self._begin()

    @overrides(PIPELINED)
    def swap_in_optimizer_state(self, parameter, async_parameter):
        """Read a sub-group's weights, gradients and state, and begin to read another's."""
        super().swap_in_optimizer_state(parameter, async_parameter)
        if self._is_swapped(parameter):
            self._install(parameter)
        self._in_step = async_parameter is not None

    @overrides(PIPELINED)
    def swap_out_optimizer_state(self, parameter, async_swap):
        """Write a sub-group's weights and state; within a step, asynchronously."""
        # Outside of a step nothing would wait for the write before the file is read.
        super().swap_out_optimizer_state(parameter, async_swap and self._in_step)

    @overrides(PIPELINED)
    def writeback_optimizer_state_and_gradients(self, parameter, write_opt_state, write_gradients):
        """Write the state or gradients, and release a sub-group's memory."""
        super().writeback_optimizer_state_and_gradients(parameter, write_opt_state, write_gradients)
        self._release(parameter)

    @overrides(PIPELINED)
    def _swap_in_optimizer_state(self, aio_handle, parameter):
        if not self._is_swapped(parameter):
            return None
        self._set_dtype(parameter)
        count = self._begin_read(aio_handle, parameter)
        op = super()._swap_in_optimizer_state(aio_handle, parameter)
        op.num_ops += count
        return op

    @overrides(PIPELINED)
    def _swap_out_optimizer_state(self, aio_handle, parameter, swap_in_op):
        op = super()._swap_out_optimizer_state(aio_handle, parameter, swap_in_op)
        op.num_ops += self._begin_write(aio_handle, parameter)
        op.state_buffer = self._forget(parameter)
        op.param_info.release_memory()
        return op

    @overrides(PIPELINED)
    def _complete_swap_out(self, swap_out_type):
        buffer = self.swap_ops[swap_out_type].state_buffer
        super()._complete_swap_out(swap_out_type)
        if buffer is not None:
            self._pool.give_back(buffer)


OURS = {
    PartitionedOptimizerSwapper: PartitionedSwapper,
    PipelinedOptimizerSwapper: PipelinedSwapper,
}
"""Our swappers, by DeepSpeed's in whose place they are made."""
