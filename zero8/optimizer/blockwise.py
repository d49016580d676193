# SPDX-License-Identifier: Apache-2.0
"""The optimizer base class of all algorithms: torch's optimizer protocol over 8-bit states."""

import copy
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, ClassVar

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import ParamsT

from zero8.deepspeed import claims, seams
from zero8.deepspeed.constructing import check_replaced, constructing_engine, global_shape
from zero8.environment.packages import warn_if_untested
from zero8.op import kernel
from zero8.op.cuda import DEVICES
from zero8.optimizer import notices
from zero8.optimizer.beyond_torch import BeyondTorch
from zero8.optimizer.loading import load
from zero8.optimizer.stepper import Stepper, plain_torch
from zero8.spec.algorithm import Algorithm
from zero8.spec.options import plain
from zero8.spec.shown import shown_keys
from zero8.state import keywords
from zero8.state.fsdp import process_groups
from zero8.state.grads import deep_copied, has_other_dtype


class BlockwiseOptimizer(BeyondTorch):
    """An optimizer with 8-bit moments; a subclass sets the algorithms and takes their keywords.

    Attributes:
        algorithm: the first of its algorithms.
        state_dict_format: see the argument; may be set between two calls of `state_dict`.
    """

    algorithm: ClassVar[Algorithm]

    def __init_subclass__(cls) -> None:
        """Name the first of its algorithms, whose keywords it takes."""
        cls.algorithm = cls.algorithms[0]

    def __init__(self, params: ParamsT, settings: Mapping[str, Any], arguments: Mapping[str, Any]):
        """Check the arguments and set up the groups; moments are made by the first step.

        `settings` are those of the whole optimizer (`keywords.DEFAULTS`), and keywords that the
        subclass does not know; among the `arguments` of its constructor, by name, are those of
        `Algorithm.options`, where a `weight_decay` of None means 0.
        """
        warn_if_untested("torch")
        class_name = type(self).__name__
        names = dict.fromkeys(name for one in self.algorithms for name in one.options)
        options = plain({name: arguments[name] for name in names})
        whole, others = keywords.split(self.algorithm, settings)
        keywords.check_other_keys(self.algorithm, class_name, others)
        self.settings = keywords.checked_settings(self.algorithm, plain(whole))
        self.state_dict_format = keywords.check_state_dict_format(whole["state_dict_format"])
        self._begin()
        if not (has_decay := options["weight_decay"] is not None):
            options["weight_decay"] = 0.0
        super().__init__(params, options | dict(self.algorithm.fp32_options))
        engine, _ = constructing_engine()
        notices.log_float32_shares(self.settings, self.infos().values())
        if engine is None and not has_decay and self._lacks_decay:
            notices.warn_of_missing_decay(options)
        if engine is not None and "adam_w_mode" in self.algorithm.keywords:
            notices.tell_of_l2(class_name, options)
        # DeepSpeed makes the optimizer before ZeRO, which must be patched before it starts.
        seams.fit(type(self))
        if any(p.device.type in DEVICES for p in self._all_params()):
            # Users expect to wait for its build here.  The first step raises what it raises.
            with suppress(Exception):
                kernel.CpuKernel()
        if engine is None:  # last, so that a failed constructor claims nothing
            claims.claim(self._all_params(), self._claim)

    def _begin(self) -> None:
        """Create run-time members, which pickling omits."""
        self._lock = threading.RLock()
        super()._begin()
        self._stepper = Stepper(self)
        self._claim = claims.Claim(self)
        self._lacks_decay = False  # whether a group was added without a weight_decay

    def algorithm_of(self, group: Mapping[str, Any]) -> Algorithm:
        """Return the algorithm of a parameter group."""
        return self.algorithm

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with its own lr, betas, eps and weight_decay if given."""
        self._wait()
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
        try:
            self._params.remember(self.param_groups, names, global_shape)
            self._check_new(self.param_groups[-1], is_replaced=engine is not None)
        except (ValueError, RuntimeError):  # RuntimeError: the shape of a lazy module's
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Return the members that pickle and deepcopy keep."""
        self._wait()
        kept = {p: why for p, info in self.infos().items() if (why := info.why_float32)}
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
        begin = None if self.beside is None else self.beside.begin(self)
        self._claim.is_met = True
        if len(self.algorithms) > 1:
            self._check_algorithms(self.state)
        # Python runs other threads while the kernel works.
        with self._lock, plain_torch():
            if skipped := self._stepper.step(self.param_groups, begin):
                # Alone, a rank must not raise while the others wait in a collective: it only logs.
                counts = self._stepper.counts
                (counts.raise_for if self._raise_alone() else counts.log)(skipped)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does, and the factor that `clip_grad_norm_` has left."""
        if not set_to_none:
            self._wait()
        super().zero_grad(set_to_none)
        self._stepper.factor.set(1.0)

    @_disable_dynamo
    @plain_torch()
    def state_dict(self) -> dict[str, Any]:
        """Return the states, in the format `state_dict_format`, and the groups.

        The tensors are the live ones, as with torch's optimizers, except for decoded moments.
        """
        self._wait()
        self._check_algorithms(self.state)
        in_fp32 = keywords.check_state_dict_format(self.state_dict_format) == "fp32"
        packed: dict[str, Any] = super().state_dict()
        packed["param_groups"] = list(map(plain, packed["param_groups"]))
        self._save(packed, in_fp32)
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
            load(self, state_dict, super().load_state_dict, self._adopt, groups)
            self.weight_sums.forget()
