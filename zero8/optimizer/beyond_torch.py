# SPDX-License-Identifier: Apache-2.0
"""What our optimizers offer beyond torch's protocol.

Clipping without a pass, and steps beside their call.
"""

import threading
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from zero8.optimizer import in_backward, in_forward
from zero8.optimizer.batch import Batch, Group
from zero8.optimizer.clipping import GradFactor, norm_and_factor
from zero8.optimizer.entry import WeightSums
from zero8.optimizer.states import HoldsStates
from zero8.optimizer.stepper import Stepper, plain_torch
from zero8.state.fsdp import process_groups


class BeyondTorch(HoldsStates):
    """An optimizer with a stepper and states."""

    _lock: threading.RLock
    _stepper: Stepper

    def scale_grads(self, factor: float | Tensor) -> None:
        """Have the next `step` multiply all gradients by a factor, without a pass over them.

        The bits are those of `grad.mul_(factor)` before the step, except that gradients and
        products below 2^-126 count as 0, and that products of 16-bit gradients with a float32
        parameter are rounded to float32.  The gradients in memory stay as they are.  The last call
        before a step counts.  A factor that is not finite makes all gradients so.

        Raises:
            RuntimeError: with steps in the backward, which use each gradient as it arrives.
        """
        self._check_not_in_backward("scale_grads")
        with self._lock:
            self._stepper.factor.set(float(np.float32(float(factor))))

    @_disable_dynamo
    @plain_torch()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the norm of all gradients, as `torch.nn.utils.clip_grad_norm_`, in the next `step`.

        This reads the gradients once.  The step multiplies them, with the bits of torch's
        multiplication except for gradients and products below 2^-126; in memory they stay as they
        are.  On a GPU they are multiplied at once.  Call it on all ranks, right before `step`;
        `zero_grad` takes it back.  `foreach` has no effect on the 2-norm on the CPU.

        Returns:
            The norm before clipping, over all ranks that share the parameters; the stages of a
            pipeline have a norm each.  The 2-norm on the CPU is float32, within 2^-23 of the exact
            one, and the same for any number of threads; others are as torch returns them.

        Raises:
            ValueError: if FSDP1 has flattened a parameter: the model's `clip_grad_norm_` clips.
            RuntimeError: with `error_if_nonfinite`, if the norm is not finite; with steps in the
                backward, which use gradients before their norm is known; later, by `step`, if
                gradients have changed since.
        """
        self._check_not_in_backward("clip_grad_norm_")
        params = self._all_params()
        total, factor = norm_and_factor(params, max_norm, norm_type, error_if_nonfinite, foreach)
        if factor is not None:
            with self._lock:
                self._stepper.factor.set(factor, [p.grad for p in params if p.grad is not None])
        return total

    def _check_not_in_backward(self, what: str) -> None:
        if isinstance(self.beside, in_backward.InBackward):
            raise RuntimeError(f"{what}: got steps in the backward, which use gradients at once")

    @property
    def copies(self) -> dict[Tensor, Tensor]:
        """For parameters on the CPU, 16-bit tensors to which the next step also writes them.

        A tensor is contiguous and has as many elements; float16 is for float32 parameters only.
        The bits are those of `copy_` after the step.  The step takes out the copies that it has
        written: those of contiguous parameters with gradients.
        """
        return self._stepper.copies

    @property
    def weight_sums(self) -> WeightSums:
        """Sums by which steps notice weights that other code has written since the last step."""
        return self._stepper.weight_sums

    def step_in_backward(self, model: torch.nn.Module) -> in_backward.InBackward:
        """Step each parameter in the backward when its gradient arrives, and free the gradient.

        `step` then only waits for pending steps, and counts and reports as usual, so that
        schedulers and hooks of steps work unchanged.  An error of a step is raised there, on all
        ranks.  The bits are those of steps after the backward.  On the CPU one thread steps while
        the backward goes on.

            optimizer.step_in_backward(model)
            for batch in batches:
                loss_of(model(batch)).backward()
                optimizer.step()

        The model must be that of this optimizer's parameters, under FSDP2 or in one process.  The
        `remove()` of what is returned ends it.

        Raises:
            ValueError: if gradients are not complete when they arrive, or are not the model's.
            RuntimeError: later, from code that needs a gradient that has been used: clipping by the
                norm of all gradients, GradScaler, gradient accumulation.
        """
        in_backward.check_model(model, self._all_params())
        self._step_in_call()
        self.beside = steps = in_backward.InBackward(self._step_one)
        steps.watch(self._all_params())
        return steps

    def step_in_forward(self, model: torch.nn.Module) -> in_forward.InForward:
        """Have `step` return at once, and step behind the model's next forward.

        The model is under FSDP2, with parameters in host memory (CPUOffloadPolicy).  A thread steps
        them in the order in which the last forward used them, and FSDP2 waits for a module's before
        it gathers them.  The bits are those of steps in the call, also with clipping.

            optimizer.step_in_forward(model)
            for batch in batches:
                loss_of(model(batch)).backward()
                optimizer.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()

        Saving and loading wait by themselves.  Code that reads or writes a parameter itself calls
        `wait()` of what is returned; `remove()` ends it.  Errors of a step are raised by the next.

        Raises:
            ValueError: if the parameters are not sharded by FSDP2 or not in host memory, are not
                the model's, or with Muon.
        """
        algorithms = map(self.algorithm_of, self.param_groups)
        in_forward.check_model(model, self._all_params(), algorithms)
        self._step_in_call()
        self.beside = steps = in_forward.InForward(model, self._step_batch)
        return steps

    def _step_in_call(self) -> None:
        if self.beside is not None:
            self.beside.remove()

    @_disable_dynamo
    def _step_batch(self, batch: Batch, factor: GradFactor) -> None:
        with self._lock, plain_torch():
            self._stepper.step_batch(batch, factor)

    @_disable_dynamo
    @plain_torch()
    def _step_one(self, p: Tensor, grad: Tensor) -> None:
        with self._lock:
            self._stepper.step_one(p, grad)

    @_disable_dynamo
    def step_groups(self, groups: Iterable[Group]) -> None:
        """Take the step of parameter groups that need not be the optimizer's; runs no hooks."""
        with self._lock, plain_torch():
            self._stepper.counts.log(self._stepper.step(groups))

    def check_finite(self, process_group: "torch.distributed.ProcessGroup | None" = None) -> None:
        """Raise FloatingPointError on every rank if steps of any rank met a non-finite number.

        One all_reduce of 8 bytes, or one for each dimension of the mesh; all ranks of the group
        (by default the mesh of sharded parameters, else all) must call it.  Waits for GPUs.
        """
        self._wait()
        counts = self._stepper.counts
        with self._lock:
            counts.log(counts.take(wait=True))
        shared = process_groups(self._all_params())
        counts.check([process_group] if process_group else shared or [None])
