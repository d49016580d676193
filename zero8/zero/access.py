# SPDX-License-Identifier: Apache-2.0
"""Keeps DeepSpeed's access to single states (safe_get and safe_set) consistent with our states.

ZeRO 1 and 2 and BF16_Optimizer take views of the states once, after the first step of the first
parameter group.  States of other groups do not exist then, and loading or offloading replaces
states.  So views are stale or missing, with any optimizer, and a rank that misses one raises while
the others hang.  For our optimizers the views are refreshed.

`offload_states` of ZeRO 1 and 2 allocates page-locked memory for a state's elements as floats; for
our optimizers only codes and scales are copied there.  ZeRO 3 takes no views, but can move only
FusedAdam's states.
"""

import functools
from types import ModuleType

from torch import Tensor

from zero8.state.store import MomentStore
from zero8.zero.moment_tensor import MomentTensor, moments_in

MOVING = ("offload_states", "reload_states")
RELINKING = ("_lazy_init_hp_params_optimizer_state", "load_state_dict", *MOVING)
"""Methods after which views may be stale or missing."""

OFFLOADS = "offload_optimizer_states"
"""The function that moves the states for `offload_states` of ZeRO 1 and 2."""


def keep_views_fresh(zero_class: type, groups: str, partitions: str, optimizer_class: type) -> None:
    """Have a ZeRO class refresh its views of our states when they have changed.

    Args:
        zero_class: the ZeRO optimizer of stages 1 and 2, or BF16_Optimizer.
        groups: its attribute with the parameters of each group.
        partitions: its attribute with this rank's flat partition of each group.
        optimizer_class: the optimizer class to patch it for.
    """

    def refreshing(name: str):
        original = getattr(zero_class, name)

        @functools.wraps(original)
        def method(self, *args, **kwargs):
            if not isinstance(self.optimizer, optimizer_class):
                return original(self, *args, **kwargs)
            if name in MOVING:
                # Views would keep the memory alive that the states move from.
                for params in getattr(self, groups):
                    _drop_views(params)
            result = original(self, *args, **kwargs)
            for params, flat in zip(getattr(self, groups), getattr(self, partitions), strict=True):
                _take_views(params, flat, self.optimizer.state.get(flat))
            return result

        return method

    for name in RELINKING:
        if hasattr(zero_class, name):
            setattr(zero_class, name, refreshing(name))


def _mappings(params: list) -> list:
    return [p._hp_mapping for p in params if getattr(p, "_hp_mapping", None) is not None]


def _drop_views(params: list) -> None:
    for mapping in _mappings(params):
        if mapping.optim_fragment is not None:
            mapping.optim_fragment.clear()


def _take_views(params: list, flat, state: dict | None) -> None:
    mappings = _mappings(params)
    if not state or all(_is_fresh(mapping, state) for mapping in mappings[:1]):
        return  # one stands for all: a group's views are taken together
    for mapping in mappings:
        mapping.set_optim_state_fragment(flat, state)


def _is_fresh(mapping, state: dict) -> bool:
    views = mapping.optim_fragment or {}
    moments = moments_in(state)
    return bool(moments) and all(
        isinstance(views.get(name), MomentTensor) and views[name].store is moment.store
        for name, moment in moments.items()
    )


def offload_codes(module: ModuleType, optimizer_class: type) -> None:
    """Have the offload to page-locked memory keep moments in 8 bits.

    Args:
        module: the module that calls `offload_optimizer_states`.
        optimizer_class: the optimizer class to patch it for.
    """
    original = getattr(module, OFFLOADS)

    @functools.wraps(original)
    def offload(optimizer, device, pin_memory=False, non_blocking=False):
        if pin_memory and isinstance(optimizer, optimizer_class):
            for state in optimizer.states.values():
                for name, moment in moments_in(state).items():
                    state[name] = _page_locked(moment, non_blocking)
        # It leaves states that are on the host already.
        return original(optimizer, device, pin_memory=pin_memory, non_blocking=non_blocking)

    setattr(module, OFFLOADS, offload)


def _page_locked(moment: MomentTensor, non_blocking: bool) -> MomentTensor:
    """Return a moment in DeepSpeed's page-locked memory; itself if it is on the host."""
    if moment.device.type == "cpu":
        return moment
    from deepspeed.accelerator import get_accelerator

    def copied(buffer: Tensor) -> Tensor:
        target = get_accelerator().pin_empty_like(buffer, device="cpu")
        return target.copy_(buffer, non_blocking=non_blocking)

    store = moment.store
    copies = (copied(buffer) for buffer in store.buffers)
    store = MomentStore(store.codec, store.rule, store.table, *copies, store.written)
    return MomentTensor(store, dtype=moment.dtype)


def refuse_to_move_states(zero3_class: type, optimizer_class: type) -> None:
    """Have ZeRO 3's `offload_states` raise for states of our optimizer, which it cannot move."""
    original = zero3_class.offload_states

    @functools.wraps(original)
    def offload_states(self, include=None, *args, **kwargs):
        asked = ["everything"] if include is None else [str(state.value) for state in include]
        if isinstance(self.optimizer, optimizer_class):
            if refused := {"everything", "optim_states", "hp_params"} & set(asked):
                raise ValueError(
                    f"offload_states: got {sorted(refused)}, but in ZeRO stage 3 DeepSpeed can "
                    "move only FusedAdam's states and master weights; include lp_params, "
                    "lp_grads or contiguous_grad_buffer, or use stage 1 or 2, or keep the states "
                    'in host memory with "offload_optimizer": {"device": "cpu"}'
                )
        return original(self, include, *args, **kwargs)

    zero3_class.offload_states = offload_states
