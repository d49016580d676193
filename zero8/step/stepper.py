# SPDX-License-Identifier: Apache-2.0
"""Takes the steps of an optimizer, and caches plans and records between them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from zero8.op import kernel
from zero8.op.describe import Snapshot
from zero8.op.devices import is_capturing, kernel_on
from zero8.spec.algorithm import Algorithm
from zero8.state.entries import is_new, others_in
from zero8.state.extent import NEVER_SHARDED
from zero8.state.header import Entries
from zero8.state.kind import StateKind
from zero8.state.memory import counters_of, unknown_memory
from zero8.state.params import KnownParams
from zero8.state.settings import Settings
from zero8.state.weights import int8_rows, values_of
from zero8.state.whole import WholeTensor
from zero8.step.batch import Batch, Group, local_grad
from zero8.step.check import check_class, check_tensors
from zero8.step.clipping import Clipped
from zero8.step.interrupts import put_off
from zero8.step.nonfinite import Ledger
from zero8.step.part import NextStep
from zero8.step.plan import Kinds, Plan
from zero8.step.prepare import prepared
from zero8.step.records import ParamRecords
from zero8.step.weight_sums import WeightSums


@contextmanager
def plain_torch() -> Iterator[None]:
    """Compute in the dtypes of the tensors and without gradients.

    `torch.autocast` would multiply float32 matrices in 16 bits.
    """
    # Of all devices: matrices in host memory are orthogonalized on a GPU.
    with torch.no_grad(), torch._C._DisableAutocast():
        yield


class Stepper:
    """The steps of one optimizer.

    Attributes:
        counts: blocks that steps have left unchanged, not yet reported.
        grad_factor: the factor of the gradients of the next step, which sets it to 1.
        clipped: the gradients that the factor is for, None if for whichever come.
        copies: by parameter on the CPU, the 16-bit tensor to which the next step also writes it,
            rounded to nearest; the step takes out those that it has written.
        weight_sums: the sums of weights with corrections that steps have left.
    """

    def __init__(
        self,
        settings: Settings,
        params: KnownParams,
        kind_of: Callable[[Tensor, Entries], StateKind],
        algorithm_of: Callable[[Group], Algorithm],
    ):
        """Start without plans; compiles nothing yet.

        Args:
            settings: the settings of the optimizer.
            params: its parameters.
            kind_of: returns the kind of a parameter's state.
            algorithm_of: returns the algorithm of a group.
        """
        self.counts = Ledger()
        self.grad_factor = 1.0
        self.clipped: Clipped | None = None
        self.copies: dict[Tensor, Tensor] = {}
        self.weight_sums = WeightSums()
        self._params, self._kind_of, self._algorithm_of = params, kind_of, algorithm_of
        self._settings = settings
        self._codec, self._corrects_bias = settings.codec, settings.bias_correction
        self._kept: dict[int, ParamRecords] = {}  # by the parameter's id
        # By the first parameter's id: ZeRO-3 steps one sub-group after the other.
        self._plans: dict[int, Plan] = {}

    def scale_grads(self, factor: float, clipped: Clipped | None = None) -> None:
        """Set the factor of the next step's gradients; `clipped` if it is for these only."""
        self.grad_factor, self.clipped = factor, clipped

    def forget_records(self) -> None:
        """Take the states as new ones: they have been replaced as a whole."""
        self._kept.clear()
        self._plans.clear()

    def forget_factor(self) -> None:
        """Take the next step's gradients as they are."""
        self.grad_factor, self.clipped = 1.0, None

    def _check_clipped(self, grads: Sequence[Tensor]) -> None:
        """Forget a factor that was for gradients which are gone; raises as `Clipped`."""
        clipped, self.clipped = self.clipped, None
        if clipped is None:
            return
        try:
            is_meant = clipped.are_there(grads)
        except RuntimeError:
            self.grad_factor = 1.0
            raise
        if not is_meant:
            self.grad_factor = 1.0

    def step(self, groups: list[Group], state: MutableMapping[Tensor, Entries]) -> dict[str, int]:
        """Take a step over the parameters that have gradients.

        Args:
            groups: the optimizer's groups.
            state: the optimizer's state.

        Returns:
            By label, the blocks that steps have left unchanged, of the counts that have arrived.

        Raises:
            ValueError: if a parameter, gradient or state is not supported; nothing has changed.
        """
        for group in groups:  # a failure to compile must come before anything has been changed
            kernel.module((self._algorithm_of(group), self._codec))
        batch = _stepping(groups, state)
        if self.clipped is not None:
            params = dict.fromkeys(batch.params)  # a parameter may be in a group twice
            self._check_clipped([p.grad for p in params if p.grad is not None])
        self.step_batch(batch, groups, state)
        return self.counts.take() if self.counts.pending else {}

    def step_batch(
        self, batch: Batch, groups: list[Group], state: MutableMapping[Tensor, Entries]
    ) -> None:
        """Take a step over a batch, like `step`."""
        if not batch.params:
            self.grad_factor = 1.0
            return
        plan, addresses = self._plan_for(batch, groups, state)
        if plan.is_on_gpus and any(is_capturing(part.device) for part in plan.parts):
            raise RuntimeError(
                "step: got a step inside the capture of a CUDA graph, whose replays would repeat "
                "this very step, with its bias corrections; capture the forward and the backward "
                "only, and call step() after a replay"
            )
        self._run(batch, plan, addresses)

    def _plan_for(
        self, batch: Batch, groups: list[Group], state: MutableMapping[Tensor, Entries]
    ) -> tuple[Plan, np.ndarray]:
        """Return an earlier step's plan if still valid, else a new one; and the addresses."""
        ids = list(map(id, batch.params))
        plan = self._plans.get(ids[0])
        if plan is not None and plan.ids == ids:
            if (addresses := plan.addresses_of(batch)) is not None:
                return plan, addresses
        self._keep_records(batch, groups, state)
        records = [self._kept[number] for number in ids]
        kinds = Kinds([one.kind for one in records])
        snapshot = Snapshot(batch.values, batch.grads, kinds.contents(batch))
        self._plans[ids[0]] = plan = Plan.of(batch, snapshot, kinds, records)
        return plan, snapshot.addresses

    def _keep_records(
        self, batch: Batch, groups: list[Group], state: MutableMapping[Tensor, Entries]
    ) -> None:
        """Make the records of the parameters that have no valid ones."""
        unfit = [single for single in batch.singles() if not self._is_kept(single)]
        new = [single for single in unfit if is_new(single.states[0])]
        infos = self._params.infos(groups) if unfit else {}
        try:
            for single in unfit:
                self._check(infos[single.params[0]].label, single)
            kernels = {
                (single.values[0].device, self._algorithm_of(single.groups[0])) for single in unfit
            }
            for device, algorithm in kernels:
                kernel_on(device, (algorithm, self._codec))
            for single in unfit:
                (p,), (its_state,) = single.params, single.states
                kind = self._kind_of(p, its_state)
                before, was_new = self._kept.get(id(p)), is_new(its_state)
                self._kept[id(p)] = records = prepared(kind, single, infos[p], self.weight_sums)
                # Partitions, whose moments move, note what is written into them.
                if isinstance(kind, WholeTensor) and before is not None and not was_new:
                    if not records.has_floats_of(before):
                        its_state |= unknown_memory(kind.algorithm)
        except Exception:  # a failed step must not leave new states behind
            for single in new:
                (p,), (its_state,) = single.params, single.states
                others = others_in(its_state, self._algorithm_of(single.groups[0]))
                its_state.clear()
                its_state.update(others)
                if not others:
                    state.pop(p, None)  # one that is in a group twice is here twice
            raise

    def _check(self, label: str, single: Batch) -> None:
        (p,), (values,), (grad,) = single.params, single.values, single.grads
        (group,) = single.groups
        # A parameter that was frozen when the optimizer was made is checked here first.
        check_class(label, p, self._algorithm_of(group), self._settings)
        check_tensors(label, values, grad, is_int8=int8_rows(p) is not None)

    def _is_kept(self, single: Batch) -> bool:
        """Return whether a parameter has valid records."""
        kept = self._kept.get(id(single.params[0]))
        if kept is None or is_new(single.states[0]):
            return False
        contents = Kinds([kept.kind]).contents(single)
        return kept.snapshot.addresses_if_same(single.values, single.grads, contents) is not None

    def _run(self, batch: Batch, plan: Plan, addresses: np.ndarray) -> None:
        plan.kinds.note_writes(batch.states)
        steps, which = self._next_steps(batch)
        with put_off():  # Ctrl-C after the kernel would leave a step that states do not count
            for part in plan.parts:
                self.counts.pending += part.step(batch, addresses, steps, which, self.copies)
                part.note(batch.states, steps, which)
            self.grad_factor = 1.0

    def _next_steps(self, batch: Batch) -> tuple[list[NextStep], list[int]]:
        """Return the distinct next steps, and for each parameter the index of its own."""
        number: dict[tuple[int, tuple[float, ...]], int] = {}
        groups = {id(group): group for group in batch.groups}
        counters = {key: counters_of(self._algorithm_of(group)) for key, group in groups.items()}
        which = [
            number.setdefault((id(group), counters[id(group)](state)), len(number))
            for group, state in zip(batch.groups, batch.states, strict=True)
        ]
        return [self._next_step(groups[at], *counts) for at, counts in number], which

    def _next_step(self, group: Group, step: float, *memory: float) -> NextStep:
        number, algorithm = int(step) + 1, self._algorithm_of(group)
        after = algorithm.next_memory(number, tuple(map(float, memory)), group)
        names = (one.name for one in algorithm.memory)
        entries = {"step": number, **dict(zip(names, after, strict=True))}
        scalars = algorithm.scalars(number, after, group, self._corrects_bias)
        if self.grad_factor != 1.0:
            scalars = scalars._replace(grad_factor=self.grad_factor)
        return NextStep(number, entries, scalars)


def _stepping(groups: Iterable[Group], state: Mapping[Tensor, Entries]) -> Batch:
    """Return the parameters that have gradients.

    Args:
        groups: the optimizer's groups.
        state: the optimizer's state, a defaultdict that adds empty states.
    """
    batch = Batch([], [], [], [], [])
    for group in groups:
        for p in group["params"]:
            if (grad := p.grad) is not None:
                batch.groups.append(group)
                batch.params.append(p)
                is_plain = type(p) in NEVER_SHARDED  # most are; saves the calls
                batch.values.append(p if is_plain else values_of(p))
                batch.grads.append(grad if is_plain else local_grad(p, grad))
                batch.states.append(state[p])
    return batch
