# SPDX-License-Identifier: Apache-2.0
"""The optimizer's step behind the next forward, for ZeRO-3 with the optimizer offloaded.

With `"zero8": {"step_in_forward": true}`, `engine.step()` returns as soon as the ranks agree on
overflow and norm.  DeepSpeed's five methods that step a sub-group are put off: a thread calls them,
sub-group by sub-group, in the order in which the last forward used these.  The bits are those of
steps in the call.

* A gather of parameters waits for their sub-groups.  All else that reads or writes weights, states
  or gradients waits for all of them: the backward, saves, loads, `safe_get_*`, the next step.
* Settings are those at `step()`: the groups are copied, and the gradients' factor is computed.
* Parameters that DeepSpeed keeps gathered (`stage3_param_persistence_threshold`) are gathered where
  the forward first uses them, instead of in the step.
* From a step to the next backward nothing is prefetched: the forward would wait for sub-groups that
  it does not need yet.  This cannot depend on which are done, as ranks must gather alike.

**Errors.**  If the step of a sub-group fails, the rank logs the error, keeps it, and leaves the
sub-groups after it as they are.  Gathers go on with these weights: a rank that raised alone would
leave the others waiting.  The next `step`, save or load, which all ranks enter, raises on all of
them.  A single rank raises where it waits next.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from operator import methodcaller
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from zero8.deepspeed.seam import ENGINE, STAGE3, of_engine, rely_on, replaced, seam
from zero8.deepspeed.settings import EngineSettings
from zero8.deepspeed.step import factor_of, leave_to_step, step_sub_group
from zero8.environment.worker import Behind
from zero8.state.tell import logger

_UNSCALES = "unscale_and_clip_grads"
_STEPS = "_optimizer_step"
_PUT_OFF = (
    "_prepare_sub_group",
    _UNSCALES,
    _STEPS,
    "_reassign_or_swap_out_partitioned_parameters",
    "_release_sub_group",
)
"""The methods by which DeepSpeed's `step` steps a sub-group, in this order."""
_PREFETCHED = "_PartitionedParameterCoordinator__prefetch_bucket_sz"
_LAST = -1
"""The number of the unit of work after those of the sub-groups."""

for name in _PUT_OFF:
    rely_on(STAGE3, name)


class _SubGroups(Behind):
    """The sub-groups of an optimizer of ZeRO-3, whose steps are put off.

    Attributes:
        unit_of: the number of a parameter's sub-group, by the parameter's `ds_id`.
    """

    def __init__(self, zero: Any):
        super().__init__()
        self.unit_of = {p.ds_id: i for i, group in enumerate(zero.fp16_groups) for p in group}
        self._coordinator = zero.parameter_offload.param_coordinator
        self._prefetched = getattr(self._coordinator, _PREFETCHED)
        # In the default stream, copies of weights to a GPU would wait for the forward's kernels.
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    def step(self, zero: Any, original: Callable) -> None:
        """Call DeepSpeed's step, and have the thread take the sub-groups' steps after it."""
        self.agree()
        optimizer = zero.optimizer
        if _hooks_of(optimizer):  # they find weights that have been stepped
            original(zero)
            return
        groups = [dict(group) for group in optimizer.param_groups]
        factors: list[Any] = []
        calls: dict[int, list[Callable]] = {}

        def later(name: str, *args: Any) -> None:
            number, call = args[0] if args else _LAST, partial(methodcaller(name, *args), zero)
            if name == _UNSCALES:
                factors[:] = factors or [factor_of(zero, args[1])]  # the same for all
                call = partial(_unscale, zero, number, *factors)
            elif name == _STEPS:
                call = partial(_step, zero, number, groups)
            calls.setdefault(number, []).append(call)

        with ExitStack() as stack:
            for name in _PUT_OFF:
                stack.enter_context(replaced(zero, name, partial(later, name)))
            reset = partial(later, "reset_cpu_buffers")
            stack.enter_context(replaced(zero, "reset_cpu_buffers", reset))
            stack.enter_context(replaced(zero, "persistent_parameters", []))
            original(zero)
        self._begin(zero, calls)

    def _begin(self, zero: Any, calls: dict[int, list[Callable]]) -> None:
        zero.optimizer._opt_called = True  # torch's schedulers, which follow, warn without it
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        setattr(self._coordinator, _PREFETCHED, 0)
        works = {number: partial(self._take, zero, of_one) for number, of_one in calls.items()}
        last = works.pop(_LAST)
        self.do(works)
        self.do({_LAST: last})

    def _take(self, zero: Any, calls: Iterable[Callable]) -> None:
        """Take the step of a sub-group, in the thread."""
        try:
            with torch.cuda.stream(self._stream):
                for call in calls:
                    call()
            if self._stream is not None:
                self._stream.synchronize()
        except BaseException:  # of any class: the thread keeps it until the ranks agree
            logger.exception("zero8: the optimizer's step behind the forward has failed")
            raise

    def begin(self, _: Any) -> None:
        """Wait for all sub-groups."""
        self.wait()

    def need_params(self, params: Iterable[Any]) -> None:
        """Wait for the sub-groups of parameters that are gathered."""
        found = {self.unit_of[p.ds_id] for p in params if p.ds_id in self.unit_of}
        self.need(sorted(found))  # sets of parameters have any order

    def prefetch(self) -> None:
        """Have DeepSpeed prefetch parameters again."""
        setattr(self._coordinator, _PREFETCHED, self._prefetched)


def _step(zero: Any, sub_group_id: int, groups: list[dict]) -> None:
    number, stepped = zero.sub_group_to_group_id[sub_group_id], list(groups)
    p = zero.fp32_partitioned_groups_flat[sub_group_id]
    stepped[number] = groups[number] | {"params": [p]}
    step_sub_group(zero, sub_group_id, lambda: zero.optimizer.step_groups(stepped))


def _hooks_of(optimizer: Any) -> bool:
    of_all = *_global_optimizer_pre_hooks, *_global_optimizer_post_hooks
    its = *optimizer._optimizer_step_pre_hooks, *optimizer._optimizer_step_post_hooks
    return bool(of_all or its)


def _unscale(zero: Any, sub_group_id: int, factor: Any) -> None:
    if not leave_to_step(zero, sub_group_id, lambda: factor):
        zero.fp32_partitioned_groups_flat[sub_group_id].grad.mul_(factor)


_behind: "WeakKeyDictionary[Any, _SubGroups]" = WeakKeyDictionary()
"""By optimizer of ZeRO-3, if its steps are put off."""

_HALVES = "weights, states and gradients would be read or written in the middle of a step"


@seam(
    ENGINE,
    "_configure_zero_optimizer",
    "no step would be put off",
    "optimizer",
    optimizer=lambda _, optimizer: optimizer,
)
def make(original: Callable, engine: Any, optimizer: Any) -> Any:
    """Put off the steps of an engine whose config asks for it."""
    zero = original(engine, optimizer)
    if EngineSettings.of(engine._config._param_dict).step_in_forward:
        _behind[zero] = behind = _SubGroups(zero)
        optimizer.beside = behind
    return zero


@seam(STAGE3, "step", "no step would be put off")
def step(original: Callable, zero: Any, *args: Any, **kwargs: Any) -> Any:
    """Put off the steps of sub-groups."""
    if (behind := _behind.get(zero)) is None:
        return original(zero, *args, **kwargs)
    return behind.step(zero, original)


@seam(
    "deepspeed.runtime.zero.partition_parameters:Init",
    "_ensure_availability_of_partitioned_params",
    "the forward would use weights before their step",
    "params",
    optimizer=None,
)
def gather(original: Callable, init: Any, params: list) -> None:
    """Wait for the sub-groups of parameters, which all gathers do here."""
    if _behind:
        for zero in {p._z3_optimizer for p in params if hasattr(p, "_z3_optimizer")}:
            if (behind := _behind.get(zero)) is not None:
                behind.need_params(params)
    original(init, params)


@seam(STAGE3, "backward_prologue", _HALVES)
def begin_backward(original: Callable, zero: Any) -> None:
    """Wait for what the forward has not used: the backward writes gradients."""
    if (behind := _behind.get(zero)) is not None:
        behind.wait()
        behind.prefetch()
    original(zero)


def finish(original: Callable, zero: Any, *args: Any, **kwargs: Any) -> Any:
    """Wait for all sub-groups first."""
    if (behind := _behind.get(zero)) is not None:
        behind.wait()
    return original(zero, *args, **kwargs)


for name in (
    "set_local_grad_for_param",
    "_get_fp32_grad_state_partition",
    "_get_fp32_opt_state_partition",
    "get_fp32_grad_partitions",
    "update_fp32_grad_for_param_vectorized",
    "_set_fp32_optimizer_param_groups",  # by state_dict and load_state_dict
    "load_state_dict",
    "refresh_fp32_params",
    "offload_states",
    "reload_states",
):
    seam(STAGE3, name, _HALVES)(finish)


@seam(STAGE3, "destroy", _HALVES)
def destroy(original: Callable, zero: Any) -> None:
    """Wait for all sub-groups, and end the thread."""
    if (behind := _behind.pop(zero, None)) is not None:
        behind.worker.close()
    original(zero)


_ALONE = "a failed step of one rank would be saved, or raise on that rank alone"


@seam(ENGINE, "save_checkpoint", _ALONE, "save_dir", optimizer=of_engine)
@seam(ENGINE, "save_16bit_model", _ALONE, "save_dir", optimizer=of_engine)
@seam(ENGINE, "load_checkpoint", _ALONE, "load_dir", optimizer=of_engine)
def agree(original: Callable, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Wait for all sub-groups; raise on all ranks if the step of one has failed."""
    if (behind := _behind.get(engine.optimizer)) is not None:
        behind.agree()
    return original(engine, *args, **kwargs)
