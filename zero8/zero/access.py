# SPDX-License-Identifier: Apache-2.0
"""Keeps DeepSpeed's access to single states (safe_get and safe_set) in touch with our states.

ZeRO 1 and 2 and BF16_Optimizer take views of the states once, after the first step of the first
parameter group: states of other groups do not exist then, and later ones (loaded, offloaded and
reloaded) are others.  The views are stale or missing from then on, with any optimizer, and a rank
that misses one raises while the others wait.  For our optimizer they are taken again.

ZeRO 3 takes no views, but moves the states of FusedAdam only.
"""

import functools

from zero8.saved import MOMENTS
from zero8.zero.moment_tensor import MomentTensor

RELINKING = ("_lazy_init_hp_params_optimizer_state", "load_state_dict", "reload_states")
"""Methods after which views may be missing: a step's, a load's, and that of `offload_states`."""


def keep_views_fresh(zero_class: type, groups: str, partitions: str, optimizer_class: type) -> None:
    """Have a ZeRO class take its views of our states again when they have changed.

    Args:
        zero_class: a class that wraps an optimizer.
        groups: its attribute with the parameters of each group.
        partitions: its attribute with this rank's flat partition of each group.
        optimizer_class: whose states are meant.
    """

    def refreshing(original):
        @functools.wraps(original)
        def method(self, *args, **kwargs):
            result = original(self, *args, **kwargs)
            if isinstance(self.optimizer, optimizer_class):
                for params, flat in zip(
                    getattr(self, groups), getattr(self, partitions), strict=True
                ):
                    _take_views(params, flat, self.optimizer.state.get(flat))
            return result

        return method

    for name in RELINKING:
        if hasattr(zero_class, name):
            setattr(zero_class, name, refreshing(getattr(zero_class, name)))


def _take_views(params: list, flat, state: dict | None) -> None:
    mappings = [p._hp_mapping for p in params if getattr(p, "_hp_mapping", None) is not None]
    if not state or all(_is_fresh(mapping, state) for mapping in mappings[:1]):
        return  # the views of a group are all taken at once
    for mapping in mappings:
        mapping.set_optim_state_fragment(flat, state)


def _is_fresh(mapping, state: dict) -> bool:
    views = [(mapping.optim_fragment or {}).get(which) for which in MOMENTS]
    return all(
        isinstance(view, MomentTensor) and view.store is getattr(state.get(which), "store", None)
        for view, which in zip(views, MOMENTS, strict=True)
    )


def refuse_to_move_states(zero3_class: type, optimizer_class: type) -> None:
    """Have ZeRO 3's `offload_states` say, for our optimizer, what it can move and what not."""
    original = zero3_class.offload_states

    @functools.wraps(original)
    def offload_states(self, include=None, *args, **kwargs):
        asked = ["everything"] if include is None else [str(state.value) for state in include]
        if isinstance(self.optimizer, optimizer_class):
            if refused := {"everything", "optim_states", "hp_params"} & set(asked):
                raise ValueError(
                    f"offload_states: got {sorted(refused)}, but in ZeRO stage 3 DeepSpeed moves "
                    "optimizer states and master weights of FusedAdam only; include lp_params, "
                    "lp_grads or contiguous_grad_buffer, or use stage 1 or 2, or keep the states "
                    'in host memory with "offload_optimizer": {"device": "cpu"}'
                )
        return original(self, include, *args, **kwargs)

    zero3_class.offload_states = offload_states
