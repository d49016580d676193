# SPDX-License-Identifier: Apache-2.0
"""Steps in the backward: each parameter steps as soon as its gradient arrives and frees it.

On the CPU a separate thread steps while the backward goes on; on a GPU the step joins the stream
of the gradient.  A forked process lacks that thread, and its backward waits for each step.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from zero8.environment.worker import StepsBeside
from zero8.optimizer.batch import overlap
from zero8.state.extent import local
from zero8.state.fsdp import process_groups
from zero8.state.weights import values_of

USED = (
    "step_in_backward has stepped with this gradient and freed it.  It rules out whatever needs "
    "gradients after the backward or across backwards: clipping by the norm of all gradients, "
    "GradScaler, gradient accumulation (except FSDP2's set_requires_gradient_sync).  Call remove() "
    "on the object that step_in_backward returned to get gradients again"
)

MOST_WAITING_BYTES = 1 << 30
"""The backward blocks while queued gradients exceed this many bytes."""

TakeStep = Callable[[Tensor, Tensor], None]
"""Takes the step of a parameter, from the parameter and its gradient."""


class UsedGradient(Tensor):
    """Replaces a gradient that has been used: every operation on it raises RuntimeError.

    With None instead, gradient clipping would silently do nothing.
    """

    @staticmethod
    def __new__(cls, grad: Tensor) -> "UsedGradient":
        """Return the replacement of a gradient."""
        return Tensor._make_wrapper_subclass(cls, grad.shape, dtype=grad.dtype, device=grad.device)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's has a keyword
        """Return a constant; torch's would read values."""
        return "UsedGradient()"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares its C function's signature
        cls, func: object, types: object, args: object = (), kwargs: object = None
    ) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError(USED)


class InBackward(StepsBeside):
    """The hooks of an optimizer whose parameters step in the backward, and their pending steps."""

    def __init__(self, take_step: TakeStep):
        """Start without parameters."""
        super().__init__("in the backward")
        self._take_step = take_step
        self._hooks: dict[Tensor, torch.utils.hooks.RemovableHandle] = {}
        self._used: list[Tensor] = []
        self._waiting_bytes, self._room = 0, threading.Condition()
        self._is_removed = False

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        """Finish the last steps; from the next backward on, step also new parameters.

        Raises on all ranks, which must call it, if a step of one has failed.
        """
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self._clear()
        # On a GPU a step that fails raises in the backward; and no rank knows what others stepped.
        self._is_agreed = all(p.device.type != "cpu" for p in params)
        self.agree(process_groups(params))
        self.watch(params)

    def watch(self, params: Iterable[Tensor]) -> None:
        """Step also these parameters from the next backward on."""
        if self._is_removed:
            return
        for p in params:
            if p not in self._hooks and p.requires_grad:
                self._hooks[p] = p.register_post_accumulate_grad_hook(self._step)

    def remove(self) -> None:
        """Finish pending steps, and remove the hooks."""
        for hook in self._hooks.values():
            hook.remove()
        self._hooks, self._is_removed = {}, True
        self._clear()
        self.worker.close()
        self.wait()

    def _clear(self) -> None:
        """Clear used gradients for the next backward."""
        used, self._used = self._used, []
        for p in used:
            p.grad = None

    def _step(self, p: Tensor) -> None:
        if (grad := p.grad) is None:
            return
        p.grad = UsedGradient(grad)
        self._used.append(p)
        if p.device.type != "cpu":
            self._take_step(p, grad)
            if (mine := local(grad)).is_cuda:
                # Its stream may be another one, which reuses its memory as soon as it is freed.
                mine.record_stream(torch.cuda.current_stream(mine.device))
            return
        num_bytes, arrival = local(grad).nbytes, arrival_of_gradient(p)
        with self._room:
            self._room.wait_for(lambda: self._has_room_for(num_bytes))
            self._waiting_bytes += num_bytes
        self.worker.do(id(p), lambda: self._step_waiting(p, grad, num_bytes, arrival))

    def _has_room_for(self, num_bytes: int) -> bool:
        return not self._waiting_bytes or self._waiting_bytes + num_bytes <= MOST_WAITING_BYTES

    def _step_waiting(
        self, p: Tensor, grad: Tensor, num_bytes: int, arrival: torch.cuda.Event | None
    ) -> None:
        try:
            if arrival is not None:
                # On its GPU: otherwise this thread would create a context on the first one.
                with torch.cuda.device(arrival.device):
                    arrival.synchronize()
            self._take_step(p, grad)
        finally:
            with self._room:
                self._waiting_bytes -= num_bytes
                self._room.notify()


def arrival_of_gradient(p: Tensor) -> torch.cuda.Event | None:
    """Return the event after which the gradient of a parameter on the CPU can be read, or None.

    With CPUOffloadPolicy, FSDP2 copies gradients from the GPU to page-locked memory, and before
    PyTorch 2.13 it calls hooks while the copy is pending on their current stream.
    """
    mesh = getattr(p, "device_mesh", None)
    if mesh is None or mesh.device_type != "cuda":
        return None
    event = torch.cuda.Event(blocking=True)  # the worker sleeps
    event.record()
    return event


def check_model(model: nn.Module, params: Sequence[Tensor]) -> None:
    """Raise ValueError unless gradients of these parameters are final when they arrive."""
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "step_in_backward: got a model in DistributedDataParallel, which sums gradients over "
            "ranks in buckets after they have arrived; expected FSDP2 (fully_shard) or one process"
        )
    if any(getattr(p, "_fsdp_flattened", False) for p in params):
        raise ValueError(
            "step_in_backward: got parameters of FSDP1, whose gradients are sharded after they "
            "have arrived; expected FSDP2 (fully_shard) or one process"
        )
    values = [values_of(p) for p in params]
    addresses = np.array([one.data_ptr() for one in values], np.uint64)
    if overlap(addresses, values):
        raise ValueError(
            "step_in_backward: got parameters that share memory, so one would be stepped while the "
            "backward still reads the other; expected one Parameter in both places, as tied "
            "weights are"
        )
    theirs = {id(p) for p in model.parameters()}
    if others := [p for p in params if id(p) not in theirs]:
        raise ValueError(
            f"step_in_backward: got {len(others)} parameters that are not the model's, the first "
            f"of shape {tuple(others[0].shape)}; expected an optimizer of the model as it is "
            "trained: make it after fully_shard, and not for DeepSpeed, which steps flat buffers"
        )
