# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's access to single states (safe_get and safe_set), and moving states off a GPU.

ZeRO 1 and 2 and BF16_Optimizer take views of the states once, after the first step of the first
parameter group.  States of other groups do not exist then, and loading or offloading replaces
states.  So views are stale or missing, with any optimizer, and a rank that misses one raises while
the others hang.  For our optimizers the views are refreshed.

`offload_states` of ZeRO 1 and 2 allocates page-locked memory for a state's elements as floats; for
our optimizers only codes and scales are copied there.  ZeRO-3 takes no views; it refuses to move
master weights and states of any optimizer but FusedAdam, so for ours they are moved here.
"""

from collections.abc import Callable, Container, Iterator
from typing import Any

from torch import Tensor

from zero8.deepspeed.gradients import masters_of
from zero8.deepspeed.moment_tensor import MomentTensor, moments_in
from zero8.deepspeed.page_locked import page_locked_zeros
from zero8.deepspeed.seam import BF16, STAGE3, STAGE12, of_argument, seam

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
    optimizer=of_argument,
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


_REFUSES = "ZeRO-3 would refuse to move master weights and states"


@seam(STAGE3, "offload_states", _REFUSES, "include", "device", "pin_memory", "non_blocking")
def offload_stage3(
    original: Callable,
    zero: Any,
    include: Container | None = None,
    device: Any = None,
    pin_memory: bool = True,
    non_blocking: bool = False,
) -> None:
    """Move master weights and states of ours, and have DeepSpeed move all else."""
    from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum, OffloadStateTypeEnum
    from deepspeed.runtime.zero.offload_states import offload_optimizer_states

    device = device or OffloadDeviceEnum.cpu
    masters, states = OffloadStateTypeEnum.hp_params, OffloadStateTypeEnum.optim_states
    wanted = {kind for kind in OffloadStateTypeEnum if include is None or kind in include}
    ours = (wanted & {masters, states}) - zero.offloaded_states
    how = {"pin_memory": pin_memory, "non_blocking": non_blocking}
    if masters in ours:
        _offload_masters(zero, device.value, **how)
    if states in ours:
        offload(offload_optimizer_states, zero.optimizer, device.value, **how)
    zero.offloaded_states |= ours
    original(zero, wanted - {masters, states}, device, **how)


def _offload_masters(zero: Any, device: str, pin_memory: bool, non_blocking: bool) -> None:
    """Move master weights; DeepSpeed moves them back from `hp_params_pin_buffers`, if these are."""
    masters = masters_of(zero)
    if pin_memory and not hasattr(zero, "hp_params_pin_buffers"):
        zero.hp_params_pin_buffers = [page_locked_zeros(p.shape, p.dtype) for p in masters]
    for number, p in enumerate(masters):
        if hasattr(zero, "hp_params_pin_buffers"):
            p.data = zero.hp_params_pin_buffers[number].copy_(p, non_blocking=non_blocking)
        else:
            p.data = p.data.to(device, non_blocking=non_blocking)


@seam(
    STAGE3.partition(":")[0],
    "reload_adam_states",
    _REFUSES,
    "optimizer",
    "device",
    "non_blocking",
    optimizer=of_argument,
)
def reload(original: Callable, optimizer: Any, device: Any, non_blocking: bool = False) -> None:
    """Move states back."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero.offload_states import reload_optimizer_states

    left = reload_optimizer_states(optimizer, device, non_blocking=non_blocking)
    if non_blocking:
        get_accelerator().synchronize()  # before their memory goes
    del left


def _page_locked(moment: MomentTensor, non_blocking: bool) -> MomentTensor:
    """Return a moment in page-locked memory; itself if it is on the host."""
    if moment.device.type == "cpu":
        return moment

    def copied(buffer: Tensor) -> Tensor:
        target = page_locked_zeros(buffer.shape, buffer.dtype)
        return target.copy_(buffer, non_blocking=non_blocking)

    return MomentTensor(moment.store.with_buffers(copied), dtype=moment.dtype)
