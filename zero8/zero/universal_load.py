# SPDX-License-Identifier: Apache-2.0
"""Fixes DeepSpeed's loading of universal checkpoints, for our optimizers.

DeepSpeed's bugs, with any optimizer:

* Stages 1 and 2 fail on a rank that holds only padding of a parameter group, and the other ranks
  hang.  Here such a rank gets an empty fragment of a parameter during the load.
* Stage 3 gives all parameter groups the options (learning rate, weight decay, ...) of the first.
* Stage 3 loads Adam's two moments, whatever the optimizer has.
* Groups that the checkpoint lacks are silently not loaded.
* Under `round_robin_gradients` stages 1 and 2 compute wrong offsets of parameters.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from zero8.algorithms.adam import ADAM
from zero8.state.keywords import check_refused_keys

LOADS = "load_hp_checkpoint_state_from_checkpoint_dir"
"""The method of stages 1 and 2 and BF16_Optimizer that loads a universal checkpoint."""
LOADS_STAGE3 = f"{LOADS}_stage3"
LINKS = "_link_all_hp_params"
"""The method of stages 1 and 2 that locates the parameters in the partitions."""


def load_into_padding(zero_class: type, partitions: str, optimizer_class: type) -> None:
    """Have a ZeRO class load universal checkpoints on ranks that hold only padding of a group, too.

    Args:
        zero_class: the ZeRO optimizer of stages 1 and 2, or BF16_Optimizer.
        partitions: its attribute with this rank's flat partition of each group.
        optimizer_class: the optimizer class to patch it for.
    """
    original = getattr(zero_class, LOADS)

    @functools.wraps(original)
    def load(self, lp_groups_name, checkpoint_dir):
        if not isinstance(self.optimizer, optimizer_class):
            return original(self, lp_groups_name, checkpoint_dir)
        _check_groups(checkpoint_dir, self.optimizer)
        with _lent_fragments(getattr(self, lp_groups_name), getattr(self, partitions)):
            return original(self, lp_groups_name, checkpoint_dir)

    setattr(zero_class, LOADS, load)


@contextlib.contextmanager
def _lent_fragments(groups: list, partitions: list) -> Iterator[None]:
    """Give the first parameter of each group that is only padding here an empty fragment."""
    from deepspeed.utils.tensor_fragment import fragment_address, tensor_fragment

    lent = []
    for number, (params, flat) in enumerate(zip(groups, partitions, strict=True)):
        if not params or any(p._hp_mapping is not None for p in params):
            continue
        nowhere = fragment_address(numel=0, start=0)
        params[0]._hp_mapping = tensor_fragment(
            lp_fragment=params[0].detach().flatten()[:0],
            lp_fragment_address=nowhere,
            hp_fragment=flat.detach()[:0],
            hp_fragment_address=nowhere,
            gradient_dict={},
            offload_gradient_dict={},
            use_offload=False,
            param_group_index=number,
        )
        lent.append(params[0])
    try:
        yield
    finally:
        for p in lent:
            p._hp_mapping = None


def load_all_groups(zero3_class: type, optimizer_class: type) -> None:
    """Have ZeRO 3 load every group's own options and moments, instead of the first's and Adam's."""
    original = getattr(zero3_class, LOADS_STAGE3)

    @functools.wraps(original)
    def load(self, checkpoint_dir):
        if not isinstance(self.optimizer, optimizer_class):
            return original(self, checkpoint_dir)
        saved = _check_groups(checkpoint_dir, self.optimizer)
        has_adams = all(one is ADAM for one in self.optimizer.algorithms)
        if has_adams:
            original(self, checkpoint_dir)
        else:
            _load_without_moments(self, original, checkpoint_dir)
        for group, options in zip(self.optimizer.param_groups, saved, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})
        if not has_adams:
            _load_moments(self, Path(checkpoint_dir) / "zero")

    setattr(zero3_class, LOADS_STAGE3, load)


def _load_without_moments(zero3, original: Callable, checkpoint_dir: str) -> None:
    """Have DeepSpeed load all but the moments, of which it gets no elements."""
    read = zero3.load_hp_checkpoint_state

    def read_weights(folder, key, param=None):
        return read(folder, key, param=param) if key == "fp32" else torch.empty(0)

    zero3.load_hp_checkpoint_state = read_weights
    try:
        original(zero3, checkpoint_dir)
    finally:
        del zero3.load_hp_checkpoint_state


def _load_moments(zero3, folder: Path) -> None:
    """Load the moments of each group's algorithm into the states, in float32."""
    optimizer = zero3.optimizer
    for number, params in enumerate(zero3.fp16_groups):
        flat = zero3.fp32_partitioned_groups_flat[number]
        group = optimizer.param_groups[zero3.sub_group_to_group_id[number]]
        state = optimizer.state[flat]
        for name in ADAM.moment_names:
            state.pop(name, None)
        for name in optimizer.algorithm_of(group).moment_names:
            state[name], at = torch.zeros_like(flat), 0
            for p in params:
                path = str(folder / zero3.param_names[p])
                part = zero3.load_hp_checkpoint_state(path, name, param=p)
                state[name].narrow(0, at, part.numel()).copy_(part)
                at += part.numel()


def _check_groups(checkpoint_dir: str, optimizer) -> list[dict]:
    """Return the parameter groups of a universal checkpoint.

    Raises:
        ValueError: on all ranks, if their number is not the optimizer's, or one has an option that
            it refuses.
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
    return saved


def find_places_in_round_robin(zero_class: type, optimizer_class: type) -> None:
    """Have ZeRO 1 and 2 locate parameters correctly under `round_robin_gradients`.

    DeepSpeed reads the true offsets only if there is padding between parameters, so this pretends
    that there is.
    """
    original = getattr(zero_class, LINKS)

    @functools.wraps(original)
    def link(self):
        paddings = self.round_robin_bit16_padding
        if isinstance(self.optimizer, optimizer_class) and self.round_robin_gradients:
            self.round_robin_bit16_padding = [[1] for _ in paddings]
        try:
            return original(self)
        finally:
            self.round_robin_bit16_padding = paddings

    setattr(zero_class, LINKS, link)
