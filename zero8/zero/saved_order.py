# SPDX-License-Identifier: Apache-2.0
"""Refuses checkpoints of ZeRO 1 and 2 whose parameters lie elsewhere than the engine's.

A partition is read by position: with parameters in another order, weights and moments would
become those of other parameters.  Our states say which parameters they are of; master weights, and
states of fp32 optimizers, do not, but these stages save the place of each name.  Stage 3 does not.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import distributed

Place = tuple[int, int, int]
"""Of a parameter's part on a rank: the number of its group, its start there, its elements."""

MAPPINGS = "param_slice_mappings"


def refuse_other_order(zero_class: type, optimizer_class: type) -> None:
    """Have a ZeRO class check the order of a checkpoint's parameters before it loads it.

    Args:
        zero_class: the ZeRO optimizer of stages 1 and 2, or BF16_Optimizer.
        optimizer_class: the optimizer class to patch it for.
    """
    original = zero_class.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self, state_dict_list, *args, **kwargs):
        # A universal checkpoint, which is read by name, comes without state dicts.
        if isinstance(self.optimizer, optimizer_class) and state_dict_list:
            _check_places(self, state_dict_list)
        return original(self, state_dict_list, *args, **kwargs)

    zero_class.load_state_dict = load_state_dict


def _check_places(zero, state_dicts: Sequence[Mapping[str, Any]]) -> None:
    group = zero.dp_process_group
    is_of_as_many = len(state_dicts) == distributed.get_world_size(group)
    # DeepSpeed saves wrong places with it, and converts partitions without the padding of others.
    is_uncertain = getattr(zero, "round_robin_gradients", False) or any(
        map(any, getattr(zero, "round_robin_bit16_padding", ()))
    )
    if not is_of_as_many or is_uncertain:
        return
    saved = _places(state_dicts[distributed.get_rank(group)].get(MAPPINGS) or ())
    ours, known = _places(zero._param_slice_mappings), set(zero.param_names.values())
    for name, place in saved.items():
        if name in known and place != ours.get(name):
            raise ValueError(
                f"load_checkpoint: got {name} at {_shown(place)}, expected {_shown(ours.get(name))}"
                ": the checkpoint's parameters are in another order, and ZeRO would read those of "
                "others. Give the optimizer its parameters in the order of the run that saved it, "
                "or make a universal checkpoint of it, which is read by name: zero8 checkpoint "
                "universal"
            )


def _places(mappings: Sequence[Mapping[str, Any]]) -> dict[str, Place]:
    return {
        name: (number, part.start, part.numel)
        for number, of_group in enumerate(mappings)
        for name, part in of_group.items()
    }


def _shown(place: Place | None) -> str:
    if place is None:
        return "none of it on this rank"
    number, start, numel = place
    return f"group {number}, elements {start} to {start + numel - 1}"
