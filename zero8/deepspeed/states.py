# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's access to single states (safe_get and safe_set), and moving states off a GPU.

ZeRO 1 and 2 and BF16_Optimizer take views of the states once, after the first step of the first
parameter group.  States of other groups do not exist then, and loading or offloading replaces
states.  So views are stale or missing, with any optimizer, and a rank that misses one raises while
the others hang.  For our optimizers the views are refreshed.

`offload_states` of ZeRO 1 and 2 allocates page-locked memory for a state's elements as floats; for
our optimizers only codes and scales are copied there.  ZeRO 3 takes no views, and refuses to move
the states of any but FusedAdam.
"""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from zero8.deepspeed.gradients import masters_of
from zero8.deepspeed.moment_tensor import MomentTensor, moments_in
from zero8.deepspeed.seam import BF16, STAGE12, seam

_VIEWS = "safe_get and safe_set would use stale views, or hang"


@seam(STAGE12, "_lazy_init_hp_params_optimizer_state", _VIEWS)
@seam(BF16, "_lazy_init_hp_params_optimizer_state", _VIEWS)
@seam(STAGE12, "load_state_dict", _VIEWS, "state_dict_list")
@seam(BF16, "load_state_dict", _VIEWS, "state_dict_list")
def relink(original: Callable, zero: Any, *args: Any, **kwargs: Any) -> Any:
    """Take views of the states where there are none, or stale ones."""
    result = original(zero, *args, **kwargs)
    for params, flat in zip(groups_of(zero), masters_of(zero), strict=True):
        _take_views(params, flat, zero.optimizer.state.get(flat))
    return result


@seam(STAGE12, "offload_states", _VIEWS)
@seam(STAGE12, "reload_states", _VIEWS)
def move(original: Callable, zero: Any, *args: Any, **kwargs: Any) -> Any:
    """Drop the views, which would keep the memory alive that the states move from."""
    for mapping in (mapping for params in groups_of(zero) for mapping in _mappings(params)):
        if mapping.optim_fragment is not None:
            mapping.optim_fragment.clear()
    return relink(original, zero, *args, **kwargs)


def groups_of(zero: Any) -> list[list[Tensor]]:
    """Return the model's parameters by group, in ZeRO 1 and 2 and BF16_Optimizer."""
    groups: list[list[Tensor]] = (
        zero.bit16_groups if hasattr(zero, "bit16_groups") else zero.bf16_groups
    )
    return groups


def _mappings(params: list[Tensor]) -> Iterator[Any]:
    mappings = (getattr(p, "_hp_mapping", None) for p in params)
    return (mapping for mapping in mappings if mapping is not None)


def _take_views(params: list[Tensor], flat: Tensor, state: dict | None) -> None:
    mappings = list(_mappings(params))
    if not state or all(_is_fresh(mapping, state) for mapping in mappings[:1]):
        return  # one stands for all: a group's views are taken together
    for mapping in mappings:
        mapping.set_optim_state_fragment(flat, state)


def _is_fresh(mapping: Any, state: dict) -> bool:
    views = mapping.optim_fragment or {}
    moments = moments_in(state)
    return bool(moments) and all(
        isinstance(views.get(name), MomentTensor) and views[name].store is moment.store
        for name, moment in moments.items()
    )


@seam(
    STAGE12.partition(":")[0],
    "offload_optimizer_states",
    "moments would move as floats",
    "optimizer",
    "device",
    "pin_memory",
    "non_blocking",
    optimizer=lambda optimizer, *_, **__: optimizer,
)
def offload(
    original: Callable,
    optimizer: Any,
    device: Any,
    pin_memory: bool = False,
    non_blocking: bool = False,
) -> None:
    """Move moments to page-locked memory as codes; DeepSpeed leaves what is on the host already."""
    for state in optimizer.states.values() if pin_memory else ():
        for name, moment in moments_in(state).items():
            state[name] = _page_locked(moment, non_blocking)
    original(optimizer, device, pin_memory=pin_memory, non_blocking=non_blocking)


def _page_locked(moment: MomentTensor, non_blocking: bool) -> MomentTensor:
    """Return a moment in DeepSpeed's page-locked memory; itself if it is on the host."""
    if moment.device.type == "cpu":
        return moment
    from deepspeed.accelerator import get_accelerator

    def copied(buffer: Tensor) -> Tensor:
        target = get_accelerator().pin_empty_like(buffer, device="cpu")
        return target.copy_(buffer, non_blocking=non_blocking)

    return MomentTensor(moment.store.with_buffers(copied), dtype=moment.dtype)
