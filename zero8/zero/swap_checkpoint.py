# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed lacks for swapped states: reserved disk space, checks, a complete resume.

DeepSpeed saves the swap files with a checkpoint and copies them back, unchecked.  It does not
restore learning rate, loss scale and the sub-groups too small to be swapped.  Here a failure of one
rank raises on all, before anything is changed.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from zero8.checkpoint.engine.layout import swap_folder
from zero8.ranks.agree import raise_together_quickly
from zero8.state.store import MomentStore
from zero8.state.table import PieceTable
from zero8.zero import swap_file
from zero8.zero.flat_state import check_places
from zero8.zero.swapper import STEP, SwapsStates


@dataclass(frozen=True)
class SavedMoment:
    """The first moment of a swapped sub-group in a checkpoint.

    Attributes:
        store: as it was saved, on the meta device.
        table: the sub-group's segment table in this run.
    """

    store: MomentStore
    table: PieceTable


def is_swapping(zero) -> bool:
    """Return whether a ZeRO optimizer keeps 8-bit states on a disk."""
    return isinstance(getattr(zero, "optimizer_swapper", None), SwapsStates)


def prepare(zero) -> None:
    """Reserve the disk space for all states, so that a full disk raises before the first step.

    Raises:
        OSError: on all ranks, if one has no room; it names the file.
    """
    error = None
    try:
        for parameter in _swapped(zero):
            zero.optimizer_swapper.reserve(parameter)
    except OSError as caught:
        error = caught
    raise_together_quickly(error, "take the disk space for its optimizer states")


def check(engine, load_dir: str, tag: str, options: dict) -> list[SavedMoment]:
    """Check every file that this rank will load; all ranks load a checkpoint, or none does.

    Args:
        engine: the engine.
        load_dir: folder of checkpoints.
        tag: the checkpoint's name there.
        options: the arguments of the engine's `load_checkpoint`.

    Returns:
        For each swap file that has a state, its first moment.

    Raises:
        OSError: on all ranks, if one misses a file; it names the file.
        ValueError: on all ranks, if a file of one is damaged, or of another model or world size;
            if the options ask for a part of the checkpoint only.
    """
    if options.get("load_module_only") or not options.get("load_optimizer_states", True):
        raise ValueError(
            "load_checkpoint: got load_module_only=True or load_optimizer_states=False; DeepSpeed "
            "can only load all of a checkpoint with states on NVMe; load all, or save the weights "
            "separately with save_16bit_model"
        )
    error, found = None, []
    try:
        _zero_file(engine, load_dir, tag)
        folder = swap_folder(engine, load_dir, tag)
        for parameter in _swapped(engine.optimizer):
            found += _check_files(engine.optimizer.optimizer_swapper, parameter, folder)
    except (OSError, ValueError) as caught:
        error = caught
    raise_together_quickly(error, f"load the checkpoint {Path(load_dir, tag)}")
    return found


def restore(engine, load_dir: str, tag: str, moments: list[SavedMoment]) -> None:
    """Load everything that is not in swap files, which DeepSpeed reads at the next step.

    Args:
        engine: the engine.
        load_dir: folder of checkpoints.
        tag: the checkpoint's name there.
        moments: the result of `check`.
    """
    zero = engine.optimizer
    path = str(_zero_file(engine, load_dir, tag))
    saved = engine.checkpoint_engine.load(path, map_location="cpu")["optimizer_state_dict"]
    zero.loss_scaler = saved["loss_scaler"]
    zero.dynamic_loss_scale = saved["dynamic_loss_scale"]
    zero.overflow = saved["overflow"]
    zero._set_fp32_optimizer_param_groups()
    # `load_state_dict` logs the re-encoded states; swapped ones are re-encoded at their swap-in.
    for moment in moments:
        for kind in zero.optimizer_swapper.kinds:
            if moment.store.rule in kind.algorithm.moments:
                kind.note_forms(moment.store, moment.table)
    zero.optimizer.load_state_dict(saved["optimizer_state_dict"])
    zero._clear_fp32_optimizer_param_groups()
    for number, weights in enumerate(zero.fp32_partitioned_groups_flat):
        if not zero._swappable_optimizer_subgroup(number):
            weights.data.copy_(saved["fp32_flat_groups"][number].data)


def step_together(zero3_class: type) -> None:
    """Have a swap error of one rank in `step` raise on all ranks, instead of hanging the others.

    The ranks agree before they exchange matrices (`SwapsStates.agree`), and after their sub-groups
    have stepped, before `_post_step`'s collectives.
    """
    step, post_step = zero3_class.step, zero3_class._post_step

    @functools.wraps(step)
    def stepped(self, *args, **kwargs):
        if not is_swapping(self):
            return step(self, *args, **kwargs)
        self.optimizer_swapper.has_agreed = False
        try:
            return step(self, *args, **kwargs)
        except (OSError, ValueError) as error:
            if not self.optimizer_swapper.has_agreed:
                raise_together_quickly(error, STEP)
            raise

    @functools.wraps(post_step)
    def post_stepped(self, *args, **kwargs):
        if is_swapping(self):
            self.optimizer_swapper.has_agreed = True
            raise_together_quickly(None, STEP)
        return post_step(self, *args, **kwargs)

    zero3_class.step, zero3_class._post_step = stepped, post_stepped


def _swapped(zero) -> Iterator[Tensor]:
    for number, parameter in enumerate(zero.fp32_partitioned_groups_flat):
        if zero._swappable_optimizer_subgroup(number):
            yield parameter


def _zero_file(engine, load_dir: str, tag: str) -> Path:
    """Return ZeRO's checkpoint file of this rank, from a run with or without bfloat16."""
    rank = torch.distributed.get_rank(engine.optimizer.dp_process_group)
    paths = [
        Path(engine._get_rank_zero_ckpt_name(load_dir, tag, engine.checkpoint_mp_rank, rank, bf16))
        for bf16 in (engine.bfloat16_enabled(), not engine.bfloat16_enabled())
    ]
    found = [path for path in paths if path.exists()]
    if not found:
        raise FileNotFoundError(
            f"{paths[0]}: not found; was the checkpoint saved by as many ranks, with ZeRO?"
        )
    return found[0]


def _check_files(swapper: SwapsStates, parameter: Tensor, folder: str) -> Iterator[SavedMoment]:
    """Check a sub-group's files, and yield its first moment if there is a state.

    Raises:
        OSError: if a file is missing.
        ValueError: if the files do not fit or are damaged.
    """
    weights, expected = swapper.weights_path(parameter, folder), swapper.weights_bytes(parameter)
    path = swapper.state_path(parameter, folder)
    for needed in (weights, path):
        if not Path(needed).exists():
            raise FileNotFoundError(
                f"{needed}: not found; a checkpoint of 8-bit states on NVMe needs the same model, "
                "world size and sub_group_size, and a process that made no engine before"
            )
    if Path(weights).stat().st_size != expected:
        raise ValueError(
            f"{weights}: got {Path(weights).stat().st_size} bytes of master weights, expected "
            f"{expected}; was it cut short, or saved by another model, world size or precision?"
        )
    found = swap_file.read_whole(path)
    if found is not None:
        state, layout = found
        try:
            for like in layout.like:
                state[like.name].store.check_values()
            planned = swapper.planned_layout(parameter)
            check_places(layout.table, planned.table)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        yield SavedMoment(layout.like[0], planned.table)
