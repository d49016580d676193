# SPDX-License-Identifier: Apache-2.0
"""The optimizer base class of all algorithms: torch's optimizer protocol over 8-bit states."""

import copy
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._compile import _disable_dynamo
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import ParamsT

from zero8 import notices
from zero8.fsdp.flattened import FlattenedTensor
from zero8.fsdp.meshes import parts_of_grads, process_groups
from zero8.fsdp.sharded import ShardedTensor
from zero8.loading import as_torch_casts, load
from zero8.op import kernel
from zero8.op.devices import DEVICES
from zero8.ranks import numbers
from zero8.spec.algorithm import Algorithm
from zero8.spec.codec import Codec
from zero8.spec.options import plain
from zero8.spec.shown import shown_keys
from zero8.state import keywords
from zero8.state.entries import first_entries, is_new, others_in, param_states
from zero8.state.grads import deep_copied, grad_bytes_by_dtype, has_other_dtype
from zero8.state.kind import StateKind, kind_of
from zero8.state.memory_report import MemoryReport
from zero8.state.params import KnownParams, ParamInfo
from zero8.state.store import MomentStore
from zero8.state.whole import WholeTensor
from zero8.step.batch import Batch, Group
from zero8.step.check import check_new, check_replaceable
from zero8.step.clipping import Clipped, factor_of, total_norm
from zero8.step.in_backward import InBackward, check_model
from zero8.step.stepper import Stepper, plain_torch
from zero8.step.weight_sums import WeightSums
from zero8.versions import warn_if_untested
from zero8.zero import claims, seams
from zero8.zero.constructing import check_replaced, constructing_engine, global_shape
from zero8.zero.flat_state import FlatPartition

logger = logging.getLogger("zero8")

KINDS: tuple[type[StateKind], ...] = (ShardedTensor, FlattenedTensor, FlatPartition, WholeTensor)
"""The kinds of state: the first that serves a parameter keeps its state."""


class SwappedState(Protocol):
    """The description of a state that a framework has swapped out."""

    like: Sequence[MomentStore]
    correction_numel: int


class BlockwiseOptimizer(torch.optim.Optimizer):
    """An optimizer with 8-bit moments; a subclass sets the algorithm and takes its keywords.

    Attributes:
        algorithm: the algorithm of its steps.
        settings: the settings of the whole optimizer.
        state_dict_format: see the argument; may be set between two calls of `state_dict`.
        kinds: its kinds of state (`KINDS`), with these settings.
        nonfinite_blocks: how many blocks steps have left unchanged because of a gradient that was
            not finite, as far as reported yet.
        on_disk: the parameters whose states are swapped out, with descriptions of these.
    """

    algorithm: ClassVar[Algorithm]

    def __init__(
        self,
        params: ParamsT,
        options: Mapping[str, Any],
        whole: Mapping[str, Any],
        others: Mapping[str, Any],
    ):
        """Check the arguments and set up the groups; moments are made by the first step.

        Args:
            params: parameters, groups, or `model.named_parameters()`.
            options: the defaults of groups, those of `Algorithm.options`; `weight_decay` may be
                None, which means 0.
            whole: keywords of the whole optimizer: those of `keywords.checked_settings`, and
                `state_dict_format`.
            others: keywords that the subclass does not know.

        Raises:
            ValueError: for an unknown key or a bad value, or a parameter that it can never step.
        """
        warn_if_untested("torch")
        class_name = type(self).__name__
        options, whole = plain(dict(options)), plain(dict(whole))
        keywords.check_other_keys(self.algorithm, class_name, others)
        self.settings = keywords.checked_settings(self.algorithm, whole)
        self.state_dict_format = keywords.check_state_dict_format(whole["state_dict_format"])
        self._begin()
        has_decay = options["weight_decay"] is not None
        decay = {} if has_decay else {"weight_decay": 0.0}
        super().__init__(params, {**options, **decay, **self.algorithm.fp32_options})
        notices.log_float32_shares(self.settings, self._infos().values())
        notices.warn_of_copied_embeddings(self.settings, self._infos().values())
        engine, _ = constructing_engine()
        if not has_decay and self._lacks_decay and engine is None:
            notices.warn_of_missing_decay(options)
        is_l2 = "adam_w_mode" in self.algorithm.keywords and not options["decoupled_weight_decay"]
        if engine is not None and is_l2:
            notices.tell_of_l2(class_name)
        # DeepSpeed makes the optimizer before ZeRO, which must be patched before it starts.
        seams.fit(type(self))
        if any(p.device.type in DEVICES for p in self._all_params()):
            for algorithm in self.algorithms:
                # Users expect to wait here rather than in the first step.
                kernel.prepare((algorithm, self.codec))
        if engine is None:  # last, so that a failed constructor claims nothing
            claims.claim(self._all_params(), self._claim)

    def _begin(self) -> None:
        """Create run-time members, which pickling omits."""
        self._lock = threading.RLock()
        self._params = KnownParams()
        self.kinds = [
            kind(replace(self.settings, algorithm_name=algorithm.name), self._params)
            for algorithm in self.algorithms
            for kind in KINDS
        ]
        self._stepper = Stepper(self.settings, self._params, self.kind_of, self.algorithm_of)
        self._claim = claims.Claim(self)
        self._in_backward: InBackward | None = None
        self._lacks_decay = False  # whether a group was added without a weight_decay
        self._groups_seen: tuple[list[Group], dict[Tensor, tuple[Group, int]]] = ([], {})
        self.on_disk: dict[Tensor, SwappedState] = {}

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """The algorithms of its groups."""
        return (self.algorithm,)

    def algorithm_of(self, group: Mapping[str, Any]) -> Algorithm:
        """Return the algorithm of a parameter group."""
        return self.algorithm

    def kind_of(self, p: Tensor, state: dict[str, Any]) -> StateKind:
        """Return the kind of a parameter's state; `state` is empty if it has none."""
        if len(self.algorithms) == 1:
            return kind_of(self.kinds, p, state)
        algorithm = self._algorithm_in(state) or self.algorithm_of(self._group_of(p))
        return kind_of([one for one in self.kinds if one.algorithm is algorithm], p, state)

    def _algorithm_in(self, state: Mapping[str, Any]) -> Algorithm | None:
        """Return the algorithm whose moments are in a state, None if it has none."""
        for one in self.algorithms:
            if not first_entries(one).isdisjoint(state):
                return one
        return None

    def _check_algorithms(self, states: Mapping[Tensor, dict[str, Any]]) -> None:
        """Raise ValueError if a state is not one of the algorithm of its parameter's group."""
        if len(self.algorithms) == 1:
            return
        for group in self.param_groups:
            algorithm = self.algorithm_of(group)
            for p in group["params"]:
                theirs = self._algorithm_in(states.get(p, {}))
                if theirs not in (None, algorithm):
                    raise ValueError(
                        f"parameter {self._infos()[p].label}: got a state of "
                        f"{theirs.class_name} in a group that {algorithm.class_name} steps "
                        "(use_muon was switched, or the parameter was moved); to go on so, drop "
                        "its state, and it starts anew: del optimizer.state[p]"
                    )

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
            algorithm = self.algorithm_of(param_group)
            keywords.check_new_group(algorithm, type(self).__name__, group)
            self._lacks_decay |= "weight_decay" not in param_group
        present = set(self._all_params())
        check_replaced([p for p in self._params.alive() if p not in present])
        super().add_param_group(param_group)
        # DeepSpeed will replace the parameters by flat partitions or float32 copies.
        engine, names = constructing_engine()
        self._params.remember(self.param_groups, names, global_shape)
        infos = self._infos()
        try:
            # A parameter that can never step must fail here, not at the first step.
            for p in self.param_groups[-1]["params"]:
                info = infos[p]
                self.settings.decide(info)
                if is_lazy(p):
                    continue  # a step checks it, which its module has materialized by then
                if engine is not None:
                    check_replaceable(info.label, p)
                elif p.requires_grad:
                    check_new(info.label, p, algorithm, self.settings)
                    self.kind_of(p, {}).check_new(p, info)
        except ValueError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        """Return the members that pickle and deepcopy keep."""
        kept = {p: why for p, info in self._infos().items() if (why := info.why_float32)}
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
            for key, value in self.defaults.items():
                group.setdefault(key, value)

    @property
    def nonfinite_blocks(self) -> int:
        """Blocks reported as skipped; the stepper has the count, as Lightning copies `__dict__`."""
        return self._stepper.counts.reported

    @nonfinite_blocks.setter
    def nonfinite_blocks(self, count: int) -> None:
        self._stepper.counts.reported = count

    @property
    def codec(self) -> Codec:
        """The codec of new states."""
        return self.settings.codec

    # --- Steps ----------------------------------------------------------------------------------

    @_disable_dynamo  # torch.compile cannot trace it: it passes addresses
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one optimizer step, as `zero8.spec.reference` and `zero8.algorithms` define it.

        Steps and loads of one optimizer in several threads wait for each other.
        After the first step the host does not wait for a GPU.

        Args:
            closure: evaluates the model again and returns the loss.

        Returns:
            The result of the closure, None without one.

        Raises:
            ValueError: if a gradient is sparse, complex or of an unsupported dtype, or a state does
                not fit its parameter; nothing has been changed then.
            FloatingPointError: if a gradient is NaN or infinite, or a moment is, which steps never
                cause.  Only the blocks with such numbers are left unchanged; the step counts, and
                the state can be saved and stepped further.  On a GPU a later step raises it, or
                `check_finite`; under ZeRO only `check_finite` does.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._in_backward is not None:
            self._in_backward.finish()
            self._in_backward.watch(self._all_params())
        self._claim.is_met = True
        self._check_algorithms(self.state)
        # Python runs other threads while the kernel works.
        with self._lock, plain_torch():
            if skipped := self._stepper.step(self.param_groups, self.state):
                self._report(skipped)
        return loss

    def scale_grads(self, factor: float | Tensor) -> None:
        """Have the next `step` multiply all gradients by a factor, without a pass over them.

        The bits are those of `grad.mul_(factor)` before the step, but for gradients and products
        below 2^-126, which count as 0; products of 16-bit gradients with a float32 parameter are
        rounded to float32.  The gradients in memory stay as they are.  The last call before a step
        counts.

        Args:
            factor: rounded to float32, as `mul_` does.  If it is not finite, no gradient is.

        Raises:
            RuntimeError: with steps in the backward, which use each gradient as it arrives.
        """
        self._check_not_in_backward("scale_grads")
        with self._lock:
            self._stepper.scale_grads(float(np.float32(float(factor))))

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

        Reads the gradients once; the step multiplies them, with the bits of torch's multiplication
        but for gradients and products below 2^-126.  In memory they stay as they are.  On a GPU
        they are multiplied at once, as torch does.  Call it right before `step`; `zero_grad` takes
        it back.  All ranks must call it.

        Args:
            max_norm: as torch's.
            norm_type: as torch's.
            error_if_nonfinite: as torch's.
            foreach: as torch's; without effect on the 2-norm on the CPU.

        Returns:
            The norm before clipping, over all ranks that share the parameters; the stages of a
            pipeline have a norm each.  The 2-norm on the CPU is float32, within 2^-23 of the exact
            one, and the same for any number of threads.  Others are as torch returns them: in the
            gradients' dtype, and DTensors if the gradients are.

        Raises:
            ValueError: if FSDP1 has flattened a parameter: the model's `clip_grad_norm_` clips.
            RuntimeError: if the norm is not finite, if asked for; with steps in the backward, which
                use gradients before their norm is known; later, by `step`, if gradients have
                changed since.
        """
        self._check_not_in_backward("clip_grad_norm_")
        params = self._all_params()
        grads = [p.grad for p in params if p.grad is not None]
        is_on_gpu = any(p.is_cuda for p in params)
        if is_on_gpu or float(norm_type) != 2.0:
            total = torch.nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
        else:
            total = total_norm(parts_of_grads(params))
            if error_if_nonfinite and not total.isfinite():
                raise RuntimeError(
                    "clip_grad_norm_: the norm of the gradients is not finite; with "
                    "error_if_nonfinite=False they are scaled by it"
                )
        if is_on_gpu:
            torch.nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach)
            return total
        factor = float(np.float32(factor_of(float(max_norm), total)))
        with self._lock:
            self._stepper.scale_grads(factor, Clipped(grads))
        return total

    def _check_not_in_backward(self, what: str) -> None:
        if self._in_backward is not None:
            raise RuntimeError(f"{what}: got steps in the backward, which use gradients at once")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch's, and what `clip_grad_norm_` has left for the step."""
        super().zero_grad(set_to_none)
        self._stepper.forget_factor()

    @property
    def copies(self) -> dict[Tensor, Tensor]:
        """By parameter on the CPU, a 16-bit tensor to which the next step also writes it.

        Contiguous, of as many elements: bfloat16 or float16 for a float32 parameter, bfloat16 for a
        bfloat16 one.  The bits are those of `copy_` after the step.  The step takes out the copies
        that it has written; it writes none of parameters without gradients or in another layout
        than contiguous.
        """
        return self._stepper.copies

    @property
    def weight_sums(self) -> WeightSums:
        """By what steps find corrections of bfloat16 weights that belong to other weights."""
        return self._stepper.weight_sums

    def step_in_backward(self, model: torch.nn.Module) -> InBackward:
        """Step each parameter in the backward, as soon as its gradient arrives, and free that.

        `step` then only waits for pending steps, and counts and reports as usual, so that
        schedulers and hooks of steps work unchanged.  The bits are those of steps after the
        backward.  On the CPU one thread steps while the backward goes on.

            optimizer.step_in_backward(model)
            for batch in batches:
                loss_of(model(batch)).backward()
                optimizer.step()

        Args:
            model: the model of this optimizer's parameters, under FSDP2 or in one process.

        Returns:
            A handle, whose `remove()` ends it.

        Raises:
            ValueError: if gradients are not complete when they arrive, or are not the model's.
            RuntimeError: later, from code that needs a gradient that has been used: clipping by the
                norm of all gradients, GradScaler, gradient accumulation.
        """
        check_model(model, self._all_params())
        if self._in_backward is not None:
            self._in_backward.remove()
        self._in_backward = InBackward(self._step_one)
        self._in_backward.watch(self._all_params())
        return self._in_backward

    @_disable_dynamo
    @plain_torch()
    def _step_one(self, p: Tensor, grad: Tensor) -> None:
        with self._lock:
            batch = Batch.single(self._group_of(p), p, grad, self.state)
            self._stepper.step_batch(batch, self.param_groups, self.state)

    def _group_of(self, p: Tensor) -> dict[str, Any]:
        groups, seen = self._groups_seen
        group, place = seen.get(p, ({"params": []}, 0))
        # A script may move parameters from group to group.  ZeRO-3 takes all but one partition out
        # of their group for a step, and they belong there still.
        if groups is not self.param_groups or not any(
            one is p for one in group["params"][place : place + 1]
        ):
            kept = seen if groups is self.param_groups else {}
            seen = kept | {
                one: (group, place)
                for group in self.param_groups
                for place, one in enumerate(group["params"])
            }
            self._groups_seen = self.param_groups, seen
        return seen[p][0]

    def _wait(self) -> None:
        """Wait for pending steps of the backward."""
        if self._in_backward is not None:
            self._in_backward.wait()

    def _all_params(self) -> list[Tensor]:
        """Return the parameters of all groups, each once."""
        return list(dict.fromkeys(p for group in self.param_groups for p in group["params"]))

    def check_finite(self, process_group: "torch.distributed.ProcessGroup | None" = None) -> None:
        """Raise FloatingPointError on every rank if steps of any rank met a non-finite number.

        One all_reduce of 8 bytes, or one for each dimension of the mesh; all ranks of the group
        must call it.  Waits until a GPU has finished the steps so far.

        Args:
            process_group: the ranks; by default those of the mesh of sharded parameters, else all.
        """
        self._wait()
        with self._lock:
            self._log(self._stepper.counts.take(wait=True))
        shared = process_groups(self._all_params())
        meant = [process_group] if process_group else shared or [None]
        if count := numbers.total(self.nonfinite_blocks, meant):
            raise FloatingPointError(
                f"{count} blocks met a non-finite gradient or moment so far (all ranks); they "
                "were left unchanged"
            )

    def _report(self, skipped: dict[str, int]) -> None:
        # A rank must not raise alone while the others wait in a collective; then it only logs.
        if not self._raises_alone():
            self._log(skipped)
            return
        self.nonfinite_blocks += sum(skipped.values())
        worst = sorted(skipped.items(), key=lambda item: -item[1])[:10]
        raise FloatingPointError(
            f"non-finite gradient or moment in {len(skipped)} parameter(s): "
            + ", ".join(f"{label} ({count} blocks)" for label, count in worst)
            + "; these blocks were left unchanged, all others have stepped.  To go on training, "
            "catch this error; to find the cause, run a backward in torch.autograd.detect_anomaly()"
        )

    def _raises_alone(self) -> bool:
        if not all(self.kind_of(*pair).raises_alone for pair in self.states.items()):
            return False
        # Ranks with equal gradients raise at the same step, unless the counts of a GPU arrive late.
        return numbers.num_ranks() == 1 or not self._has_params_on_gpus()

    def _has_params_on_gpus(self) -> bool:
        return any(p.is_cuda for p in self._all_params())

    def _log(self, skipped: dict[str, int]) -> None:
        self.nonfinite_blocks += sum(skipped.values())
        for label, count in skipped.items():
            logger.warning(
                "non-finite gradient or moment: %s: %d blocks left unchanged", label, count
            )

    # --- States ---------------------------------------------------------------------------------

    @property
    def states(self) -> dict[Tensor, dict[str, Any]]:
        """The states of parameters that have moments; other code may keep more in `state`."""
        return param_states(self.state)

    @_disable_dynamo
    @plain_torch()
    def state_dict(self) -> dict[str, Any]:
        """Return the states, in the format `state_dict_format`, and the groups.

        The tensors are the live ones, as with torch's optimizers, except for decoded moments.
        """
        self._wait()
        self._check_algorithms(self.state)
        in_fp32 = keywords.check_state_dict_format(self.state_dict_format) == "fp32"
        packed = super().state_dict()
        packed["param_groups"] = list(map(plain, packed["param_groups"]))
        infos = self._infos()
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in enumerate(params):  # torch saves one that is there twice by its first
            state = packed["state"].get(number)
            if isinstance(state, dict) and not is_new(state):
                kind = self.kind_of(p, state)
                packed["state"][number] = kind.saved(p, state, infos[p], in_fp32)
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this optimizer, or of the fp32 one, whose moments are quantized.

        If parameters are sharded, all ranks must call it: it makes one all_reduce of 40 bytes for
        each dimension of the mesh.

        Raises:
            ValueError: if a state does not fit its parameter, on this or on another rank; nothing
                has been changed then.
        """
        self._wait()
        with self._lock:
            groups = process_groups(self._all_params())
            load(self, state_dict, super().load_state_dict, self._adopt_loaded, groups)
            self.weight_sums.forget()

    def _adopt_loaded(self, states: dict[Tensor, dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
        """Return the states of a state dict as kept; check its groups, which are loaded already."""
        for group in self.param_groups:
            if "capturable" in group:
                # Only torch's AdamW needs it, for steps that are captured or compiled.
                group["capturable"] = False
            group.update(plain(group))
            full = {**self.defaults, **group}
            keywords.check_group(self.algorithm_of(group), type(self).__name__, full)
        self._check_algorithms(states)
        infos = self._infos()
        try:
            kept = {p: self._adopted_with_others(p, s, infos.get(p)) for p, s in states.items()}
            for kind in self.kinds if numbers.rank() == 0 else ():
                kind.reencoded.log()
        finally:
            for kind in self.kinds:
                kind.reencoded.forget()
        return kept

    def _adopted_with_others(
        self, p: Tensor, saved: dict[str, Any], info: ParamInfo | None
    ) -> dict[str, Any]:
        """Return a loaded state as this optimizer keeps it, and other code's as torch casts it."""
        if info is not None and is_lazy(p):
            raise ValueError(
                f"state of {info.label}: got one of a parameter whose lazy module has seen no "
                "input yet; call the model on a batch before load_state_dict"
            )
        others = others_in(saved, self.kind_of(p, {}).algorithm)
        kept = {key: as_torch_casts(p, key, value) for key, value in others.items()}
        return kept if is_new(saved) else kept | self.adopted(p, saved, info)

    def adopted(self, p: Tensor, saved: dict[str, Any], info: ParamInfo | None) -> dict[str, Any]:
        """Return a loaded state of a parameter as this optimizer keeps it, in new tensors.

        Raises:
            ValueError: if it does not fit the parameter.
        """
        if "state1" in saved:
            raise ValueError(
                f"state of {p if info is None else info.label}: got one of bitsandbytes; convert "
                "the file first: zero8 checkpoint convert IN OUT --to plain"
            )
        kind = self.kind_of(p, {})
        return kind.adopted(p, saved, info) | kind.correction(p, saved, info)

    def moments(self, p: Tensor) -> list[MomentStore]:
        """Return the live moments of a parameter that has state, in the algorithm's order.

        Raises:
            ValueError: if the state does not fit the parameter.
        """
        self._wait()
        state = self.state[p]
        return self.kind_of(p, state).moments(p, state, self._infos().get(p))

    def all_moments(self) -> dict[Tensor, list[MomentStore]]:
        """Return the `moments` of every parameter that has state."""
        self._wait()
        infos = self._infos()
        return {
            p: self.kind_of(p, state).moments(p, state, infos.get(p))
            for p, state in self.states.items()
        }

    def memory_report(self) -> MemoryReport:
        """Return, per parameter, whether its moments are 8-bit or float32, why, and their bytes.

        Also the bytes of these parameters' gradients, of those that there are now.
        """
        rows = []
        why = self._params.why_float32(self.param_groups)
        for p, stores in self.all_moments().items():
            state = self.state[p]
            remark = self.kind_of(p, state).remark
            rows += self.settings.memory_rows(stores, "param_correction" in state, why, remark)
        for layout in self.on_disk.values():
            rows += self.settings.memory_rows(layout.like, layout.correction_numel > 0, why)
        return MemoryReport(tuple(rows), grad_bytes_by_dtype(self.states))

    def _infos(self) -> dict[Tensor, ParamInfo]:
        return self._params.infos(self.param_groups)
