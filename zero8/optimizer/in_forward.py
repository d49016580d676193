# SPDX-License-Identifier: Apache-2.0
"""Steps behind the next forward, under FSDP2 with parameters in host memory.

`optimizer.step()` returns at once.  A thread steps the parameters of one module that FSDP2 shards
after those of another, in the order in which the last forward used them.  FSDP2 waits before it
gathers a module's parameters, and so before their next gradients arrive.  Parameters that it does
not shard are stepped in the call.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from zero8.deepspeed.seam import replaced
from zero8.environment.worker import Behind
from zero8.optimizer.batch import Batch, Begin
from zero8.optimizer.clipping import GradFactor
from zero8.spec.algorithm import Algorithm
from zero8.state.fsdp import process_groups

TakeStep = Callable[[Batch, GradFactor], None]
"""Takes the step of a batch."""

_AT_ONCE = -1
"""The place of what FSDP2 does not shard."""


class InForward(Behind):
    """The modules of a model under FSDP2 whose parameters step behind the next forward.

    The units of work are the places of FSDP2's groups of parameters in the model.
    """

    def __init__(self, model: nn.Module, take_step: TakeStep):
        """Have FSDP2, and what saves or loads the model's weights, wait for steps."""
        super().__init__()
        self._take_step = take_step
        self._groups = groups_of(model)
        self._undo = ExitStack()
        for number, group in enumerate(self._groups):
            gather = partial(self._gather, number, group.unshard)
            self._undo.enter_context(replaced(group, "unshard", gather))
        for module in model.modules():
            for accesses in ("state_dict", "load_state_dict"):
                register = getattr(module, f"register_{accesses}_pre_hook")
                self._undo.callback(register(lambda *_: self.wait()).remove)

    def begin(self, optimizer: torch.optim.Optimizer) -> Begin | None:
        """Wait for pending steps; raise on all ranks if one failed.  All ranks must call it."""
        self.agree(process_groups(p for group in optimizer.param_groups for p in group["params"]))
        # Hooks that run after steps find weights that have been stepped.
        has_hooks = optimizer._optimizer_step_post_hooks or _global_optimizer_post_hooks
        return None if has_hooks else self._take

    def _take(self, batch: Batch, factor: float) -> Batch:
        """Begin the steps of a batch; return the part of it that is to be stepped at once."""
        group_of = {
            id(one.sharded_param): number
            for number, group in enumerate(self._groups)
            for one in group.fsdp_params
        }
        places: dict[int, list[int]] = {}
        for place, p in enumerate(batch.params):
            places.setdefault(group_of.get(id(p), _AT_ONCE), []).append(place)
        at_once = batch.at(places.pop(_AT_ONCE, []))
        works = {}
        for number, of_one in places.items():
            # Schedulers write the next learning rate as soon as the call returns.
            part = with_copied_groups(batch.at(of_one))
            works[number] = partial(self._take_step, part, GradFactor(factor))
        self.do(works)
        return at_once

    def remove(self) -> None:
        """Finish pending steps, and step in the call again."""
        self._undo.close()
        self._groups = []
        self.worker.close()

    def _gather(self, number: int, original: Callable[..., None], *args: Any) -> None:
        self.need([number])
        original(*args)


def groups_of(model: nn.Module) -> list[Any]:
    """Return FSDP2's groups of the parameters that it gathers together, in the model's order."""
    # At the top of the file, it would make `import zero8` slower.
    from torch.distributed.fsdp import FSDPModule

    def found() -> Iterator[Any]:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                yield from getattr(state, "_fsdp_param_groups", [state._fsdp_param_group])

    return [group for group in dict.fromkeys(found()) if group is not None]


def with_copied_groups(batch: Batch) -> Batch:
    """Return a batch with the settings of now."""
    return batch._replace(groups=[(dict(group), count) for group, count in batch.groups])


def check_model(
    model: nn.Module, params: Sequence[Tensor], algorithms: Iterable[Algorithm]
) -> None:
    """Raise ValueError unless steps of these parameters can go on behind the model's forward."""
    groups = groups_of(model)
    sharded = [one.sharded_param for group in groups for one in group.fsdp_params]
    if not sharded or any(p.device.type != "cpu" for p in sharded):
        got = f"parameters on {sharded[0].device}" if sharded else "a model without fully_shard"
        raise ValueError(
            f"step_in_forward: got {got}; expected FSDP2 with parameters in host memory: "
            "fully_shard(..., offload_policy=CPUOffloadPolicy())"
        )
    theirs = set(map(id, params))
    if not any(id(p) in theirs for p in sharded):
        raise ValueError(
            "step_in_forward: got a model none of whose sharded parameters is the optimizer's; "
            "make the optimizer after fully_shard"
        )
    if any(one.is_of_matrices for one in algorithms):
        raise ValueError(
            "step_in_forward: got Muon, whose ranks exchange matrices in the step, which must not "
            "meet the forward's gathers; expected an optimizer that steps element by element"
        )
