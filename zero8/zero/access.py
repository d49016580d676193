# SPDX-License-Identifier: Apache-2.0
"""Keeps DeepSpeed's access to single states (safe_get and safe_set) in touch with our states.

ZeRO 1 and 2 and BF16_Optimizer take views of the states once, after the first step of the first
parameter group: states of other groups do not exist then, and later ones (loaded, offloaded and
reloaded) are others.  The views are stale or missing from then on, with any optimizer, and a rank
that misses one raises while the others wait.  For our optimizer they are taken again.

`offload_states` of ZeRO 1 and 2 asks for page-locked memory for floats, as many as a state has: for
our optimizer it gets the codes and scales in such memory instead.  ZeRO 3 takes no views, but moves
the states of FusedAdam only.
"""

import functools
from types import ModuleType

from torch import Tensor

from zero8.state.store import MomentStore
from zero8.zero.moment_tensor import MomentTensor

MOVING = ("offload_states", "reload_states")
RELINKING = ("_lazy_init_hp_params_optimizer_state", "load_state_dict", *MOVING)
"""Methods after which views may be missing: a step's, a load's, and those that move states."""

OFFLOADS = "offload_optimizer_states"
"""The function of DeepSpeed's that moves the states for `offload_states` of ZeRO 1 and 2."""


def keep_views_fresh(zero_class: type, groups: str, partitions: str, optimizer_class: type) -> None:
    """Have a ZeRO class take its views of our states again when they have changed.

    Args:
        zero_class: a class that wraps an optimizer.
        groups: its attribute with the parameters of each group.
        partitions: its attribute with this rank's flat partition of each group.
        optimizer_class: whose states are meant.
    """

    def refreshing(name: str):
        original = getattr(zero_class, name)

        @functools.wraps(original)
        def method(self, *args, **kwargs):
            if not isinstance(self.optimizer, optimizer_class):
                return original(self, *args, **kwargs)
            if name in MOVING:
                # They would keep what is moved alive where it was.
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
        return  # the views of a group are all taken at once
    for mapping in mappings:
        mapping.set_optim_state_fragment(flat, state)


def _is_fresh(mapping, state: dict) -> bool:
    views = mapping.optim_fragment or {}
    moments = {name: x for name, x in state.items() if isinstance(x, MomentTensor)}
    return bool(moments) and all(
        isinstance(views.get(name), MomentTensor) and views[name].store is moment.store
        for name, moment in moments.items()
    )


def offload_codes(module: ModuleType, optimizer_class: type) -> None:
    """Have the offload of states to page-locked memory keep 8-bit moments as they are.

    Args:
        module: the one that calls `offload_optimizer_states`.
        optimizer_class: whose states are meant.
    """
    original = getattr(module, OFFLOADS)

    @functools.wraps(original)
    def offload(optimizer, device, pin_memory=False, non_blocking=False):
        if pin_memory and isinstance(optimizer, optimizer_class):
            for state in optimizer.state.values():
                moments = {name: x for name, x in state.items() if isinstance(x, MomentTensor)}
                for name, moment in moments.items():
                    state[name] = _page_locked(moment, non_blocking)
        # What is on the host already stays.
        return original(optimizer, device, pin_memory=pin_memory, non_blocking=non_blocking)

    setattr(module, OFFLOADS, offload)


def _page_locked(moment: MomentTensor, non_blocking: bool) -> MomentTensor:
    """Return a moment in page-locked memory of DeepSpeed's kind; itself if it is on the host."""
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
