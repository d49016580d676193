# SPDX-License-Identifier: Apache-2.0
"""Saving and loading through an engine: with manifests, and what universal loading gets wrong.

DeepSpeed's bugs in loading universal checkpoints, with any optimizer:

* Stage 3 gives all parameter groups the options (learning rate, weight decay, ...) of the first.
* Stage 3 loads Adam's two moments, whatever the optimizer has.
* Groups that the checkpoint lacks are silently not loaded.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zero8.deepspeed import load, save
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
from zero8.spec.adam import ADAM
from zero8.state.keywords import check_refused_keys

_TORCH_ENGINE = "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine:TorchCheckpointEngine"

rely_on(ENGINE, "_optimizer_has_ckpt_event_epilogue")
rely_on(ENGINE, "_get_zero_param_shapes")
rely_on(ENGINE.partition(":")[0], "get_fp32_state_dict_from_zero_checkpoint", "tag")
rely_on(_TORCH_ENGINE, "save", "path")
rely_on(_TORCH_ENGINE, "load", "path")


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
    """Load a universal checkpoint that has the optimizer's groups."""
    _saved_groups(checkpoint_dir, zero.optimizer)
    original(zero, lp_groups_name, checkpoint_dir)


@seam(STAGE3, f"{_LOADS}_stage3", "all groups would get the options of the first", "checkpoint_dir")
def load_universal3(original: Callable, zero: Any, checkpoint_dir: str) -> None:
    """Load every group's own options and moments, instead of the first's and Adam's."""
    optimizer, read = zero.optimizer, zero.load_hp_checkpoint_state
    saved = _saved_groups(checkpoint_dir, optimizer)

    def read_weights(folder: str, key: str, param: Any = None) -> torch.Tensor:
        # DeepSpeed asks for Adam's moments, and gets no elements of them.
        return read(folder, key, param=param) if key == "fp32" else torch.empty(0)

    with replaced(zero, "load_hp_checkpoint_state", read_weights):
        original(zero, checkpoint_dir)
    for group, options in zip(optimizer.param_groups, saved, strict=True):
        group.update({key: value for key, value in options.items() if key != "params"})
    _load_moments(zero, Path(checkpoint_dir) / "zero")


def _load_moments(zero: Any, folder: Path) -> None:
    """Load the moments of each group's algorithm into the states, in float32."""
    optimizer = zero.optimizer
    for number, params in enumerate(zero.fp16_groups):
        flat = zero.fp32_partitioned_groups_flat[number]
        group = optimizer.param_groups[zero.sub_group_to_group_id[number]]
        state = optimizer.state[flat]
        for name in ADAM.moment_names:
            state.pop(name, None)
        for name in optimizer.algorithm_of(group).moment_names:
            state[name], at = torch.zeros_like(flat), 0
            for p in params:
                path = str(folder / zero.param_names[p])
                part = zero.load_hp_checkpoint_state(path, name, param=p)
                state[name].narrow(0, at, part.numel()).copy_(part)
                at += part.numel()


def _saved_groups(checkpoint_dir: str, optimizer: Any) -> list[dict]:
    """Return the parameter groups of a universal checkpoint.

    Raises ValueError, on all ranks, if their number is not the optimizer's, or one has an option
    that it refuses.
    """
    path = Path(checkpoint_dir) / "zero" / "optimizer_state.pt"
    saved = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["param_groups"]
    for options in saved:
        check_refused_keys(type(optimizer).__name__, options)
    groups = optimizer.param_groups
    if len(saved) != len(groups):
        raise ValueError(
            f"{checkpoint_dir}: got a checkpoint of {len(saved)} parameter groups, expected the "
            f"optimizer's {len(groups)}"
        )
    return list(saved)
