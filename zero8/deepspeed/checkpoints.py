# SPDX-License-Identifier: Apache-2.0
"""Saving and loading through an engine: with manifests, and universal checkpoints.

Moments of universal checkpoints are float32, and are encoded parameter by parameter as they are
read.  DeepSpeed's bugs in loading them, with any optimizer:

* Stage 3 gives all parameter groups the options (learning rate, weight decay, ...) of the first.
* Stage 3 loads Adam's two moments, whatever the optimizer has.
* Groups that the checkpoint lacks are silently not loaded.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero8.deepspeed import load, save
from zero8.deepspeed.gradients import masters_of
from zero8.deepspeed.moment_tensor import MomentTensor, moments_in
from zero8.deepspeed.seam import (
    BF16,
    ENGINE,
    STAGE3,
    STAGE12,
    arguments,
    of_engine,
    rely_on,
    replaced,
    seam,
)
from zero8.deepspeed.states import groups_of
from zero8.state.keywords import check_refused_keys

_TORCH_ENGINE = "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine:TorchCheckpointEngine"

rely_on(ENGINE, "_optimizer_has_ckpt_event_epilogue")
rely_on(ENGINE, "_get_zero_param_shapes")
rely_on(ENGINE.partition(":")[0], "get_fp32_state_dict_from_zero_checkpoint", "tag")
rely_on(_TORCH_ENGINE, "save", "path")
rely_on(_TORCH_ENGINE, "load", "path")
rely_on(STAGE3, "_load_global_state_stage3", "sd")
rely_on(STAGE3, "load_hp_checkpoint_state", "folder", "key", "param")


@seam(
    ENGINE,
    "save_checkpoint",
    "a checkpoint that is cut short would look whole",
    "save_dir",
    "tag",
    "save_latest",
    optimizer=of_engine,
)
def save_with_manifest(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Write a manifest last, on all ranks or on none."""
    return _instead(save.save, "save_dir", original, engine, args, kwargs)


@seam(
    ENGINE,
    "load_checkpoint",
    "damaged files would be loaded, or those of other parameters",
    "load_dir",
    "tag",
    "load_optimizer_states",
    "load_module_only",
    optimizer=of_engine,
)
def load_verified(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Verify the files and compare the parameters first, on all ranks or on none."""
    return _instead(load.load, "load_dir", original, engine, args, kwargs)


def _instead(
    ours: Callable, folder: str, original: Callable, engine: Any, args: tuple, kwargs: dict
) -> Any:
    options = arguments(original, engine, args, kwargs)
    if not options.get(folder):
        return original(engine, *args, **kwargs)  # which raises
    return ours(engine, original, options)


# --- Universal checkpoints -----------------------------------------------------------------------

_LOADS = "load_hp_checkpoint_state_from_checkpoint_dir"
_MISSING = "groups that the checkpoint lacks would start anew without a word"


@seam(STAGE12, _LOADS, _MISSING, "lp_groups_name", "checkpoint_dir")
@seam(BF16, _LOADS, _MISSING, "lp_groups_name", "checkpoint_dir")
def load_universal(original: Callable, zero: Any, lp_groups_name: str, checkpoint_dir: str) -> None:
    """Load a universal checkpoint that has the optimizer's groups, and encode its moments."""
    optimizer, masters = zero.optimizer, masters_of(zero)
    _saved(checkpoint_dir, optimizer)
    with ExitStack() as stack:
        for group, params, flat in zip(
            optimizer.param_groups, groups_of(zero), masters, strict=True
        ):
            moments = _new_moments(optimizer, group, flat)
            optimizer.state[flat].update(moments)
            for p in params:
                read = partial(_load_parameter, p, p.load_hp_checkpoint_state, moments)
                stack.enter_context(replaced(p, "load_hp_checkpoint_state", read))
        original(zero, lp_groups_name, checkpoint_dir)
    for flat in masters:
        optimizer.moments(flat)


def _load_parameter(p: Tensor, original: Callable, moments: dict, *args: Any, **kwargs: Any) -> Any:
    """Load a parameter's part, and leave no moments in float32 that DeepSpeed would join."""
    step, mapping = original(*args, **kwargs), p._hp_mapping
    found, mapping.optim_fragment = mapping.optim_fragment, {}
    if missing := moments.keys() - found.keys():
        raise ValueError(f"{args[0]}: got {sorted(found)}, without the moments {sorted(missing)}")
    at = mapping.get_hp_fragment_address()
    for name, moment in moments.items():
        moment.narrow(0, at.start, at.numel).copy_(found[name])
    return step


@seam(STAGE3, f"{_LOADS}_stage3", "all groups would get the options of the first", "checkpoint_dir")
def load_universal3(_: Callable, zero: Any, checkpoint_dir: str) -> None:
    """Load every group's own options and moments, instead of the first's and Adam's."""
    optimizer = zero.optimizer
    saved = _saved(checkpoint_dir, optimizer)
    zero._load_global_state_stage3(saved)
    for group, options in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    step = saved["optimizer_state_dict"]["state"][0]["step"]
    for number, flat in enumerate(masters_of(zero)):
        group = optimizer.param_groups[zero.sub_group_to_group_id[number]]
        moments = _new_moments(optimizer, group, flat)
        _load_sub_group(zero, number, {"fp32": flat.data, **moments}, Path(checkpoint_dir) / "zero")
        optimizer.state[flat].update(step=step, **moments)
        optimizer.moments(flat)
        zero._reassign_or_swap_out_partitioned_parameters(number)


@torch.no_grad()  # autograd would keep every part of weights that were saved as parameters
def _load_sub_group(zero: Any, number: int, targets: dict[str, Tensor], folder: Path) -> None:
    """Read the parts of a sub-group's parameters, one at a time, into flat tensors."""
    for name, target in targets.items():
        at = 0
        for p in zero.fp16_groups[number]:
            part = zero.load_hp_checkpoint_state(str(folder / zero.param_names[p]), name, param=p)
            target.narrow(0, at, part.numel()).copy_(part)
            at += part.numel()


def _new_moments(optimizer: Any, group: dict, flat: Tensor) -> dict[str, MomentTensor]:
    """Return new moments for a flat partition of parameters in a group."""
    kind = optimizer.kind_of(flat, {}, optimizer.algorithm_of(group))
    return moments_in(kind.new(flat, None))


def _saved(checkpoint_dir: str, optimizer: Any) -> dict:
    """Return what a universal checkpoint has of all parameters, such as their groups.

    Raises ValueError, on all ranks, if the groups' number is not the optimizer's, or one has an
    option that it refuses.
    """
    path = Path(checkpoint_dir) / "zero" / "optimizer_state.pt"
    saved: dict = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    for options in saved["param_groups"]:
        check_refused_keys(type(optimizer).__name__, options)
    got, groups = len(saved["param_groups"]), optimizer.param_groups
    if got != len(groups):
        raise ValueError(
            f"{checkpoint_dir}: got a checkpoint of {got} parameter groups, expected the "
            f"optimizer's {len(groups)}"
        )
    return saved
