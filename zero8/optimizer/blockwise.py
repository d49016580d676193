# SPDX-License-Identifier: Apache-2.0
"""The optimizer base class of all algorithms: torch's optimizer protocol over 8-bit states."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from zero8.deepspeed import claims, seams
from zero8.deepspeed.constructing import check_replaced, constructing_engine, global_shape
from zero8.environment.versions import warn_if_untested
from zero8.environment.worker import Worker
from zero8.op import kernel
from zero8.op.cuda import DEVICES
from zero8.optimizer import notices
from zero8.optimizer.clipping import norm_and_factor
from zero8.optimizer.entry import WeightSums
from zero8.optimizer.in_backward import InBackward, check_model
from zero8.optimizer.loading import load
from zero8.optimizer.states import States, SwappedState
from zero8.optimizer.stepper import Stepper, plain_torch
from zero8.spec.algorithm import Algorithm
from zero8.spec.options import plain
from zero8.spec.shown import shown_keys
from zero8.state import keywords
from zero8.state.fsdp import process_groups
from zero8.state.grads import deep_copied, has_other_dtype
from zero8.state.kind import StateKind
from zero8.state.memory_report import MemoryReport
from zero8.state.params import ParamInfo
from zero8.state.store import MomentStore


class BlockwiseOptimizer(torch.optim.Optimizer):
    """An optimizer with 8-bit moments; a subclass sets the algorithm and takes its keywords.

    Attributes:
        algorithm: the algorithm of its steps.
        settings: the settings of the whole optimizer.
        state_dict_format: see the argument; may be set between two calls of `state_dict`.
        behind: the thread in which steps go on after their call, None without one.
    """

    algorithm: ClassVar[Algorithm]

    def __init__(self, params: ParamsT, settings: Mapping[str, Any], **options: Any):
        """Check the arguments and set up the groups; moments are made by the first step.

        `settings` are those of the whole optimizer (`keywords.DEFAULTS`), and keywords that the
        subclass does not know; `options` are those of `Algorithm.options`, where a `weight_decay`
        of None means 0.
        """
        warn_if_untested("torch")
        class_name = type(self).__name__
        options = plain(options)
        whole, others = keywords.split(self.algorithm, settings)
        keywords.check_other_keys(self.algorithm, class_name, others)
        self.settings = keywords.checked_settings(self.algorithm, plain(whole))
        self.state_dict_format = keywords.check_state_dict_format(whole["state_dict_format"])
        self._begin()
        if not (has_decay := options["weight_decay"] is not None):
            options["weight_decay"] = 0.0
        super().__init__(params, options | dict(self.algorithm.fp32_options))
        engine, _ = constructing_engine()
        infos = self._states.infos().values()
        notices.log_float32_shares(self.settings, infos)
        notices.warn_of_copied_embeddings(self.settings, infos)
        if engine is None and not has_decay and self._lacks_decay:
            notices.warn_of_missing_decay(options)
        if engine is not None and "adam_w_mode" in self.algorithm.keywords:
            notices.tell_of_l2(class_name, options)
        # DeepSpeed makes the optimizer before ZeRO, which must be patched before it starts.
        seams.fit(type(self))
        if any(p.device.type in DEVICES for p in self._all_params()):
            kernel.prepare()  # users expect to wait here rather than in the first step
        if engine is None:  # last, so that a failed constructor claims nothing
            claims.claim(self._all_params(), self._claim)

    def _begin(self) -> None:
        """Create run-time members, which pickling omits."""
        self._lock = threading.RLock()
        self._states = States(self, self.settings, self.algorithms, self.algorithm_of)
        self._params = self._states.params
        self._stepper = Stepper(self._states)
        self._claim = claims.Claim(self)
        self._in_backward: InBackward | None = None
        self.behind: Worker | None = None
        self._groups_of_threads: dict[int, list[dict[str, Any]]] = {}
        self._lacks_decay = False  # whether a group was added without a weight_decay

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups; in a thread inside `with_groups`, its own."""
        if own := self._groups_of_threads:
            if (groups := own.get(threading.get_ident())) is not None:
                return groups
        everyones: list[dict[str, Any]] = self.__dict__["param_groups"]
        return everyones

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.__dict__["param_groups"] = groups

    @contextmanager
    def with_groups(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Have this thread step with groups of its own in the block; others see no difference."""
        ident = threading.get_ident()
        self._groups_of_threads[ident] = groups
        try:
            yield
        finally:
            del self._groups_of_threads[ident]

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """The algorithms of its groups."""
        return (self.algorithm,)

    def algorithm_of(self, group: Mapping[str, Any]) -> Algorithm:
        """Return the algorithm of a parameter group."""
        return self.algorithm

    def kind_of(self, p: Tensor, state: dict[str, Any]) -> StateKind:
        """Return the kind of a parameter's state; `state` is empty if it has none."""
        return self._states.kind_of(p, state)

    @property
    def kinds(self) -> list[StateKind]:
        """The kinds of state that its algorithms have."""
        return self._states.kinds

    @property
    def on_disk(self) -> dict[Tensor, SwappedState]:
        """The parameters whose states are swapped out, with descriptions of these."""
        return self._states.on_disk

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with its own lr, betas, eps and weight_decay if given."""
        if isinstance(param_group, dict):
            if "params" not in param_group:
                raise ValueError(
                    f"got a parameter group with {shown_keys(param_group)}, without 'params'; "
                    'expected {"params": [...]}, and the settings of the group as further entries'
                )
            param_group.update(plain(param_group))
            group = {**self.defaults, **param_group}
            keywords.check_new_group(self.algorithm_of(group), type(self).__name__, group)
            self._lacks_decay |= "weight_decay" not in param_group
        present = set(self._all_params())
        check_replaced([p for p in self._params.alive() if p not in present])
        super().add_param_group(param_group)
        # DeepSpeed will replace the parameters by flat partitions or float32 copies.
        engine, names = constructing_engine()
        self._params.remember(self.param_groups, names, global_shape)
        try:
            self._states.check_new(self.param_groups[-1], is_replaced=engine is not None)
        except ValueError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Return the members that pickle and deepcopy keep."""
        self._wait()
        kept = {p: why for p, info in self._states.infos().items() if (why := info.why_float32)}
        return {
            **super().__getstate__(),
            "settings": self.settings,
            "state_dict_format": self.state_dict_format,
            "nonfinite_blocks": self.nonfinite_blocks,
            "why_float32": kept,
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockwiseOptimizer":
        """Return a deep copy, with parameters of its own unless they are in `memo`."""
        new = memo[id(self)] = type(self).__new__(type(self))
        for p in (*self._all_params(), *self.states):  # ZeRO-3 lends the groups its partitions
            if has_other_dtype(p) and id(p) not in memo:
                memo[id(p)] = deep_copied(p, memo)
        new.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return new

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the members of `__getstate__`; groups of fp32 optimizers get missing keys."""
        settings = self.__dict__.get("settings")
        super().__setstate__(state)
        counted = self.__dict__.pop("nonfinite_blocks", None)
        kept = self.__dict__.pop("why_float32", {})
        if self.settings != settings:  # torch also calls this on a live object, while loading
            self._begin()
        self._stepper.forget_records()
        self._params.keep_in_float32(kept)
        if counted is not None:
            self.nonfinite_blocks = counted
        for group in self.param_groups:
            group |= self.defaults | group

    @property
    def nonfinite_blocks(self) -> int:
        """Blocks reported as skipped; the stepper has the count, as Lightning copies `__dict__`."""
        return self._stepper.counts.reported

    @nonfinite_blocks.setter
    def nonfinite_blocks(self, count: int) -> None:
        self._stepper.counts.reported = count

    @_disable_dynamo  # torch.compile cannot trace it: it passes addresses
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step, whose bits `zero8.spec.reference` defines.

        Steps and loads in several threads wait for each other.  After the first step the host does
        not wait for a GPU.  A closure evaluates the model again; its result is returned.

        Raises:
            ValueError: if a gradient is sparse, complex or of an unsupported dtype, or a state does
                not fit its parameter; nothing has been changed then.
            FloatingPointError: if a gradient or a moment is NaN or infinite.  Its block is left
                unchanged, all others have stepped, and the step counts.  On a GPU a later step
                raises it, or `check_finite`; under ZeRO only `check_finite` does.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward is not None:
            self._in_backward.finish()
            self._in_backward.watch(self._all_params())
        self._claim.is_met = True
        if len(self.algorithms) > 1:
            self._states.check_algorithms(self.state)
        # Python runs other threads while the kernel works.
        with self._lock, plain_torch():
            if skipped := self._stepper.step():
                # Alone, a rank must not raise while the others wait in a collective: it only logs.
                counts = self._stepper.counts
                (counts.raise_for if self._states.raise_alone() else counts.log)(skipped)
        return loss

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
        if self._in_backward is not None:
            raise RuntimeError(f"{what}: got steps in the backward, which use gradients at once")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does, and the factor that `clip_grad_norm_` has left."""
        super().zero_grad(set_to_none)
        self._stepper.factor.set(1.0)

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

    def step_in_backward(self, model: torch.nn.Module) -> InBackward:
        """Step each parameter in the backward when its gradient arrives, and free the gradient.

        `step` then only waits for pending steps, and counts and reports as usual, so that
        schedulers and hooks of steps work unchanged.  The bits are those of steps after the
        backward.  On the CPU one thread steps while the backward goes on.

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
        check_model(model, self._all_params())
        if self._in_backward is not None:
            self._in_backward.remove()
        self._in_backward = steps = InBackward(self._step_one)
        steps.watch(self._all_params())
        return steps

    @_disable_dynamo
    @plain_torch()
    def _step_one(self, p: Tensor, grad: Tensor) -> None:
        with self._lock:
            self._stepper.step_one(p, grad)

    def _wait(self) -> None:
        """Wait for pending steps, of the backward or behind the forward."""
        if self._in_backward is not None:
            self._in_backward.wait()
        if self.behind is not None:
            self.behind.wait_all()

    def _all_params(self) -> list[Tensor]:
        """Return the parameters of all groups, each once."""
        return list(dict.fromkeys(p for group in self.param_groups for p in group["params"]))

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

    @property
    def states(self) -> dict[Tensor, dict[str, Any]]:
        """The states of parameters that have moments; other code may keep more in `state`."""
        self._wait()
        return self._states.all()

    @_disable_dynamo
    @plain_torch()
    def state_dict(self) -> dict[str, Any]:
        """Return the states, in the format `state_dict_format`, and the groups.

        The tensors are the live ones, as with torch's optimizers, except for decoded moments.
        """
        self._wait()
        self._states.check_algorithms(self.state)
        in_fp32 = keywords.check_state_dict_format(self.state_dict_format) == "fp32"
        packed = super().state_dict()
        packed["param_groups"] = list(map(plain, packed["param_groups"]))
        self._states.save(packed, in_fp32)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of the fp32 one, whose moments are quantized.

        All ranks that share parameters must call it: it makes one all_reduce of 40 bytes for each
        dimension of the mesh.

        Raises:
            ValueError: if a state does not fit its parameter, on this or on another rank; nothing
                has been changed then.
        """
        self._wait()
        with self._lock:
            groups = process_groups(self._all_params())
            load(self, state_dict, super().load_state_dict, self._states.adopt, groups)
            self.weight_sums.forget()

    def adopted(self, p: Tensor, saved: dict[str, Any], info: ParamInfo | None) -> dict[str, Any]:
        """Return a loaded state of a parameter as this optimizer keeps it, in new tensors."""
        return self._states.adopted(p, saved, info)

    def moments(self, p: Tensor) -> list[MomentStore]:
        """Return the live moments of a parameter that has state, in the algorithm's order."""
        self._wait()
        return self._states.moments(p, self._states.infos())

    def all_moments(self) -> dict[Tensor, list[MomentStore]]:
        """Return the `moments` of every parameter that has state."""
        self._wait()
        return self._states.all_moments()

    def memory_report(self) -> MemoryReport:
        """Return the bits and bytes of each parameter's moments, the reason, and gradient bytes."""
        self._wait()
        return self._states.memory_report()
