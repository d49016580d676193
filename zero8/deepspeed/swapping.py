# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed lacks for swapped states: our swappers, reserved disk space, a complete resume.

DeepSpeed saves the swap files with a checkpoint and copies them back, unchecked.  It does not
restore learning rate, loss scale and the sub-groups too small to be swapped.  Here a failure of one
rank raises on all, before anything is changed.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zero8.deepspeed import swap_file
from zero8.deepspeed.flat_state import check_places
from zero8.deepspeed.layout import swap_folder
from zero8.deepspeed.moment_tensor import moments_in
from zero8.deepspeed.seam import ENGINE, STAGE3, arguments, of_engine, replaced, seam
from zero8.environment.agree import raise_together_quickly

if TYPE_CHECKING:
    from zero8.deepspeed.swapper import SwapsStates


def is_swapping(zero: Any) -> bool:
    """Return whether a ZeRO optimizer keeps 8-bit states on a disk."""
    from zero8.deepspeed.swapper import SwapsStates  # imports DeepSpeed's

    return isinstance(getattr(zero, "optimizer_swapper", None), SwapsStates)


# --- Swappers ------------------------------------------------------------------------------------

_CODES = "8-bit states could not be swapped"
_STAGE3_FILE = STAGE3.partition(":")[0]


def _of_arguments(*_: Any, **kwargs: Any) -> object:
    return kwargs.get("optimizer")


@seam(_STAGE3_FILE, "PartitionedOptimizerSwapper", _CODES, optimizer=_of_arguments)
@seam(_STAGE3_FILE, "PipelinedOptimizerSwapper", _CODES, optimizer=_of_arguments)
def make_swapper(original: type, *args: Any, **kwargs: Any) -> Any:
    """Make our swapper of the same kind."""
    from zero8.deepspeed.swapper import OURS

    return OURS[original](*args, **kwargs)


@seam(
    ENGINE,
    "_configure_zero_optimizer",
    "a full disk would end a training in the middle",
    "optimizer",
    optimizer=lambda _, optimizer: optimizer,
)
def configure_zero(original: Callable, engine: Any, optimizer: Any) -> Any:
    """Write all states, so that a full disk raises before the first step.

    Raises OSError on all ranks, if one has no room; it names the file.
    """
    zero, error = original(engine, optimizer), None
    if is_swapping(zero):
        try:
            for parameter in _swapped(zero):
                zero.optimizer_swapper.begin(parameter)
        except OSError as caught:
            error = caught
        raise_together_quickly(error, "take the disk space for its optimizer states")
    return zero


# --- Steps ---------------------------------------------------------------------------------------

_HANGS = "a swap error of one rank would leave the others waiting"


@seam(STAGE3, "step", _HANGS)
def step(original: Callable, zero: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise a swap error of one rank on all.

    The ranks agree before they exchange matrices (`SwapsStates.agree`), and after their sub-groups
    have stepped, before `_post_step`'s collectives.
    """
    if not is_swapping(zero):
        return original(zero, *args, **kwargs)
    zero.optimizer_swapper.has_agreed = False
    try:
        return original(zero, *args, **kwargs)
    except Exception as error:  # of any class, as the others wait
        zero.optimizer_swapper.drain()
        if not zero.optimizer_swapper.has_agreed:
            zero.optimizer_swapper.raise_on_all(error)
        raise


@seam(STAGE3, "_post_step", _HANGS)
def post_step(original: Callable, zero: Any, *args: Any, **kwargs: Any) -> Any:
    """Have the ranks agree first."""
    if is_swapping(zero):
        zero.optimizer_swapper.raise_on_all(None)
    return original(zero, *args, **kwargs)


# --- Checkpoints ---------------------------------------------------------------------------------


@seam(
    ENGINE,
    "_load_checkpoint",
    "damaged swap files would be loaded, and a part of the state never",
    "load_dir",
    "tag",
    "load_optimizer_states",
    "load_module_only",
    optimizer=of_engine,
)
def load(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Check swap files before they are loaded, and load what is not in them, too."""
    if not is_swapping(engine.optimizer):
        return original(engine, *args, **kwargs)
    options = arguments(original, engine, args, kwargs)
    _check_loads_all(options)
    if engine.load_universal_checkpoint():
        return original(engine, *args, **kwargs)
    place = options["load_dir"], options["tag"]
    _check(engine, *place)
    engine.optimizer.optimizer_swapper.expect_other_files()
    result = original(engine, *args, **kwargs)
    _restore(engine, *place)
    return result


def no_files_of_universal(engine: Any) -> AbstractContextManager:
    """Return a context in which DeepSpeed copies no swap files of a universal checkpoint.

    It would do so instead of loading the checkpoint, which has none.
    """
    if engine.load_universal_checkpoint() and is_swapping(engine.optimizer):
        return replaced(engine, "zero_nvme_offload_optimizer", lambda: False)
    return nullcontext()


def _check_loads_all(options: dict) -> None:
    """Raise ValueError, on all ranks, if a part of the checkpoint is asked for."""
    if options.get("load_module_only") or not options.get("load_optimizer_states", True):
        raise ValueError(
            "load_checkpoint: got load_module_only=True or load_optimizer_states=False; DeepSpeed "
            "can only load all of a checkpoint with states on NVMe; load all, or save the weights "
            "separately with save_16bit_model"
        )


def _check(engine: Any, load_dir: str, tag: str) -> None:
    """Check every file that this rank will load.

    Raises OSError on all ranks, if one misses a file; ValueError on all, if a file of one is
    damaged, or of another model or world size.
    """
    error = None
    try:
        _zero_file(engine, load_dir, tag)
        folder = swap_folder(engine, load_dir, tag)
        for parameter in _swapped(engine.optimizer):
            _check_files(engine.optimizer.optimizer_swapper, parameter, folder)
    except (OSError, ValueError) as caught:
        error = caught
    raise_together_quickly(error, f"load the checkpoint {Path(load_dir, tag)}")


def _restore(engine: Any, load_dir: str, tag: str) -> None:
    """Load everything that is not in swap files, which DeepSpeed reads at the next step."""
    zero = engine.optimizer
    path = str(_zero_file(engine, load_dir, tag))
    saved = engine.checkpoint_engine.load(path, map_location="cpu")["optimizer_state_dict"]
    zero.loss_scaler = saved["loss_scaler"]
    zero.dynamic_loss_scale = saved["dynamic_loss_scale"]
    zero.overflow = saved["overflow"]
    zero._set_fp32_optimizer_param_groups()
    zero.optimizer.load_state_dict(saved["optimizer_state_dict"])
    zero._clear_fp32_optimizer_param_groups()
    for number, weights in enumerate(zero.fp32_partitioned_groups_flat):
        if not zero._swappable_optimizer_subgroup(number):
            weights.data.copy_(saved["fp32_flat_groups"][number].data)


def _swapped(zero: Any) -> Iterator[Tensor]:
    for number, parameter in enumerate(zero.fp32_partitioned_groups_flat):
        if zero._swappable_optimizer_subgroup(number):
            yield parameter


def _zero_file(engine: Any, load_dir: str, tag: str) -> Path:
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


def _check_files(swapper: "SwapsStates", parameter: Tensor, folder: str) -> None:
    """Check a sub-group's files."""
    weights, expected = swapper.weights_file(parameter, folder)
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
    state = swap_file.load(path)
    try:
        stores = [moment.store for moment in moments_in(state).values()]
        for store in stores:
            store.check_values()
        check_places(stores[0].table, swapper.table(parameter))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
