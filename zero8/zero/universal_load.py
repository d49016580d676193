# SPDX-License-Identifier: Apache-2.0
"""What DeepSpeed gets wrong about universal checkpoints and the partitions they are loaded into.

All of it happens with every optimizer, and is mended for ours:

* Stages 1 and 2 fail on a rank that holds nothing but the padding of a parameter group, and the
  other ranks wait for it.  It is lent an empty fragment of a parameter for the load.
* Stage 3 gives all parameter groups the learning rate, weight decay and so on of the first.
* Groups that the checkpoint does not have are left as they are, silently.
* Under `round_robin_gradients` stages 1 and 2 look for parameters at the wrong places.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import torch

from zero8.state.keywords import check_refused_keys

LOADS = "load_hp_checkpoint_state_from_checkpoint_dir"
"""The method that loads a universal checkpoint, of stages 1 and 2 and BF16_Optimizer."""
LOADS_STAGE3 = f"{LOADS}_stage3"
LINKS = "_link_all_hp_params"
"""The method of stages 1 and 2 that finds the places of the parameters in the partitions."""


def load_into_padding(zero_class: type, partitions: str, optimizer_class: type) -> None:
    """Have a ZeRO class load universal checkpoints on ranks that hold nothing of a group, too.

    Args:
        zero_class: a class that wraps an optimizer, of stages 1 and 2.
        partitions: its attribute with this rank's flat partition of each group.
        optimizer_class: whose states are meant.
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
    """Give the first parameter of a group of which this rank holds nothing an empty fragment."""
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
    """Have ZeRO 3 load every parameter group's options, not those of the first for all."""
    original = getattr(zero3_class, LOADS_STAGE3)

    @functools.wraps(original)
    def load(self, checkpoint_dir):
        if not isinstance(self.optimizer, optimizer_class):
            return original(self, checkpoint_dir)
        saved = _check_groups(checkpoint_dir, self.optimizer)
        original(self, checkpoint_dir)
        for group, options in zip(self.optimizer.param_groups, saved, strict=True):
            group.update({key: value for key, value in options.items() if key != "params"})

    setattr(zero3_class, LOADS_STAGE3, load)


def _check_groups(checkpoint_dir: str, optimizer) -> list[dict]:
    """Return the parameter groups of a universal checkpoint.

    Raises:
        ValueError: on all ranks, if there are more or fewer than the optimizer has, or one asks for
            what it does not do.
    """
    path = Path(checkpoint_dir) / "zero" / "optimizer_state.pt"
    saved = torch.load(path, map_location="cpu", mmap=True, weights_only=False)["param_groups"]
    for options in saved:
        check_refused_keys(optimizer.algorithm, options)
    groups = optimizer.param_groups
    if len(saved) != len(groups):
        raise ValueError(
            f"{checkpoint_dir}: got a checkpoint of {len(saved)} parameter groups, expected "
            f"{len(groups)}, as the optimizer has"
        )
    return saved


def find_places_in_round_robin(zero_class: type, optimizer_class: type) -> None:
    """Have ZeRO 1 and 2 find parameters where `round_robin_gradients` has put them.

    DeepSpeed looks at the offsets only where there is padding between parameters, though they are
    right in any case.
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
