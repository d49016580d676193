# SPDX-License-Identifier: Apache-2.0
"""Takes the steps of an optimizer, and caches plans and records between them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from operator import is_, itemgetter

import numpy as np
import torch
from torch import Tensor

from zero8.environment.interrupts import put_off
from zero8.op import kernel
from zero8.op.cuda import is_capturing, kernel_on
from zero8.optimizer.batch import Batch, Begin, Group, Row
from zero8.optimizer.call import NextStep
from zero8.optimizer.check import check_class, check_tensors
from zero8.optimizer.clipping import GradFactor
from zero8.optimizer.entry import Entry, WeightSums, contents_of, prepared
from zero8.optimizer.nonfinite import Ledger
from zero8.optimizer.plan import Plan, planned
from zero8.optimizer.states import HoldsStates
from zero8.state.entries import is_new, others_in
from zero8.state.extent import NEVER_SHARDED, local_grad
from zero8.state.header import Entries
from zero8.state.kind import Contents
from zero8.state.memory import counters, unknown_memory
from zero8.state.params import ParamInfo
from zero8.state.weights import int8_rows, values_of
from zero8.state.whole import WholeTensor


@contextmanager
def plain_torch() -> Iterator[None]:
    """Compute in the dtypes of the tensors and without gradients.

    `torch.autocast` would multiply float32 matrices in 16 bits.
    """
    # Of all devices: matrices in host memory are orthogonalized on a GPU.
    with torch._C._DisableAutocast():
        was_enabled = torch.is_grad_enabled()
        torch.set_grad_enabled(False)  # a third of the time of `no_grad`, at every step
        try:
            yield
        finally:
            torch.set_grad_enabled(was_enabled)


class Stepper:
    """The steps of one optimizer.

    Attributes:
        counts: blocks that steps have left unchanged, not yet reported.
        factor: that of the gradients of the next step, which forgets it.
        copies: by parameter on the CPU, the 16-bit tensor to which the next step also writes it,
            rounded to nearest; the step takes out those that it has written.
        weight_sums: the sums of weights with corrections that steps have left.
    """

    def __init__(self, optimizer: HoldsStates):
        """Start without plans; compiles nothing yet."""
        self.counts = Ledger()
        self.factor = GradFactor()
        self.copies: dict[Tensor, Tensor] = {}
        self.weight_sums = WeightSums()
        self._optimizer = optimizer
        self._entries: dict[int, Entry] = {}  # by the parameter's id
        # By the first parameter's id: ZeRO-3 steps one sub-group after the other.
        self._plans: dict[int, Plan] = {}
        # By the parameter's id, the numbers of its group and of it in there, when it last stepped.
        self._places: dict[int, tuple[int, int]] = {}

    def forget_records(self) -> None:
        """Take the states as new ones: they have been replaced as a whole."""
        self._entries.clear()
        self._plans.clear()

    def step(self, groups: Iterable[Group], begin: Begin | None = None) -> dict[str, int]:
        """Take a step over the parameters of some groups that have gradients.

        `begin` may take some of them out of the batch, to step them later.  Returns the blocks
        that steps have left unchanged, by label, of the counts that have arrived.  Raises
        ValueError if a parameter, gradient or state is not supported; nothing has changed then.
        """
        batch = _stepping(groups, self._optimizer.state)
        if self.factor.meant is not None:
            params = dict.fromkeys(batch.params)  # a parameter may be in a group twice
            self.factor.check([p.grad for p in params if p.grad is not None])
        if begin is not None:
            batch = begin(batch, self.factor.value)
        self.step_batch(batch, self.factor, groups)
        return self.counts.take() if self.counts.pending else {}

    def step_one(self, p: Tensor, grad: Tensor) -> None:
        """Take the step of one parameter with a gradient that it may no longer have."""
        value, state = values_of(p), self._optimizer.state[p]
        batch = Batch([(self._group_of(p), 1)], [p], [value], [local_grad(p, grad)], [state])
        self.step_batch(batch, self.factor)

    def _group_of(self, p: Tensor) -> Group:
        """Return the group of a parameter; a script may move it from group to group.

        A search for each parameter of thousands would take longer than their steps.
        """
        groups = self._optimizer.param_groups
        number, place = self._places.get(id(p), (0, 0))
        there = [group["params"][place : place + 1] for group in groups[number : number + 1]]
        if not any(one is p for params in there for one in params):
            self._places = {
                id(one): (number, place)
                for number, group in enumerate(groups)
                for place, one in enumerate(group["params"])
            }
            number, _ = self._places[id(p)]
        return groups[number]

    def step_batch(
        self, batch: Batch, factor: GradFactor, groups: Iterable[Group] | None = None
    ) -> None:
        """Take a step over a batch out of groups, like `step`; sets the factor to 1."""
        if not batch.params:
            factor.value = 1.0
            return
        plan, addresses = self._plan_for(batch, groups)
        steps, which = self._next_steps(batch, factor.value)
        with put_off():  # Ctrl-C after the kernel would leave a step that states do not count
            for call in plan.calls:
                self.counts.pending += call.take(batch, addresses, steps, which, self.copies)
            factor.value = 1.0

    def _plan_for(self, batch: Batch, groups: Iterable[Group] | None) -> tuple[Plan, np.ndarray]:
        """Return an earlier step's plan if still valid, else a new one; and the addresses."""
        first = id(batch.params[0])
        plan = self._plans.get(first)
        if plan is None or (addresses := _addresses_if_valid(plan, batch)) is None:
            entries = self._entries_of(batch, groups)
            keys, _ = _contents(batch, entries, all(one.is_plain for one in entries))
            self._plans[first] = plan = planned(batch, entries, keys)
            addresses = batch.addresses()
        if plan.is_on_gpus and any(is_capturing(call.device) for call in plan.calls):
            raise RuntimeError(
                "step: got a step inside the capture of a CUDA graph, whose replays would repeat "
                "this very step, with its bias corrections; capture the forward and the backward "
                "only, and call step() after a replay"
            )
        return plan, addresses

    def _entries_of(self, batch: Batch, groups: Iterable[Group] | None) -> list[Entry]:
        """Return the entries of a batch; makes those of the parameters that have no valid ones."""
        rows = {id(row.param): row for row in batch.rows()}
        known = self._entries
        unfit = [row for at, row in rows.items() if at not in known or not known[at].is_valid(row)]
        if unfit:
            self._prepare(unfit, self._optimizer.infos(groups))
        return [known[id(p)] for p in batch.params]

    def _prepare(self, rows: Sequence[Row], infos: Mapping[Tensor, ParamInfo]) -> None:
        """Make the entries of some parameters, and the states of those that have none."""
        new = [row for row in rows if is_new(row.state)]
        try:
            for row in rows:
                self._check(infos[row.param].label, row)
            # A failure to compile must come before anything has been changed.
            for device in {row.value.device for row in rows}:
                kernel_on(device)
            for row in rows:
                p, was_new, before = row.param, is_new(row.state), self._entries.get(id(row.param))
                algorithm = self._optimizer.algorithm_of(row.group)
                kind = self._optimizer.kind_of(p, row.state, algorithm)
                entry = prepared(kind, row, infos[p], self.weight_sums)
                self._entries[id(p)] = entry
                # Partitions, whose moments move, note what is written into them.
                if isinstance(kind, WholeTensor) and before is not None and not was_new:
                    if not entry.has_floats_of(before):
                        row.state.update(unknown_memory(kind.algorithm))
        except Exception:  # a failed step must not leave new states behind
            for row in new:
                others = others_in(row.state, self._optimizer.algorithm_of(row.group))
                row.state.clear()
                row.state.update(others)
                if not others:
                    self._optimizer.state.pop(row.param, None)
            raise

    def _check(self, label: str, row: Row) -> None:
        # A parameter that was frozen when the optimizer was made is checked here first.
        check_class(
            label, row.param, self._optimizer.algorithm_of(row.group), self._optimizer.settings
        )
        is_int8 = int8_rows(row.param) is not None
        check_tensors(label, row.value, row.grad, is_int8=is_int8)

    def _next_steps(self, batch: Batch, factor: float) -> tuple[list[NextStep], np.ndarray]:
        """Return the distinct next steps, and for each parameter the index of its own."""
        steps: list[NextStep] = []
        which: list[np.ndarray] = []
        states = iter(batch.states)
        for group, count in batch.groups:
            algorithm, mine = self._optimizer.algorithm_of(group), list(islice(states, count))
            columns = [list(map(read, mine)) for read in counters(algorithm).values()]
            first = tuple(map(itemgetter(0), columns))
            if set(map(list.count, columns, first)) == {count}:  # as most often
                which.append(np.full(count, len(steps)))
                distinct = [first]
            else:
                place: dict[tuple[float, ...], int] = {}
                for counts in zip(*columns, strict=True):
                    place.setdefault(counts, len(steps) + len(place))
                which.append(np.array([place[counts] for counts in zip(*columns, strict=True)]))
                distinct = list(place)
            steps += [self._next_step(group, factor, *counts) for counts in distinct]
        return steps, which[0] if len(which) == 1 else np.concatenate(which)

    def _next_step(self, group: Group, factor: float, step: float, *memory: float) -> NextStep:
        number, algorithm = int(step) + 1, self._optimizer.algorithm_of(group)
        after = algorithm.next_memory(number, tuple(map(float, memory)), group)
        entries = dict(zip(counters(algorithm), (number, *after), strict=True))
        corrects = self._optimizer.settings.bias_correction
        scalars = algorithm.exact_scalars(number, after, group, corrects).values()
        return NextStep(number, entries, (*scalars, factor))


def _stepping(groups: Iterable[Group], state: Mapping[Tensor, Entries]) -> Batch:
    """Return the parameters that have gradients.

    `state` is a defaultdict, which adds empty states.
    """
    batch = Batch([], [], [], [], [])
    for group in groups:
        before = len(batch.params)
        for p in group["params"]:
            if (grad := p.grad) is not None:
                batch.params.append(p)
                batch.grads.append(grad)
        if count := len(batch.params) - before:
            batch.groups.append((group, count))
    # The keys of most are the parameters, in order: a tensor's hash is a function in Python.
    are_theirs = len(state) == len(batch.params) and all(map(is_, state, batch.params))
    states = state.values() if are_theirs else map(state.__getitem__, batch.params)
    batch.states.extend(states)
    if NEVER_SHARDED.issuperset(map(type, batch.params)):  # most are; saves the calls
        return batch._replace(values=batch.params)
    values, grads = map(values_of, batch.params), map(local_grad, batch.params, batch.grads)
    return batch._replace(values=list(values), grads=list(grads))


def _addresses_if_valid(plan: Plan, batch: Batch) -> np.ndarray | None:
    """Return the addresses of a batch, (2, parameters) uint64, None if the plan is not for it."""
    keys, contents = _contents(batch, plan.entries, plan.is_plain)
    if keys != plan.keys:
        return None
    objects, num_addresses = [*batch.values, *batch.grads, *contents], 2 * len(batch.params)
    addresses = kernel.addresses_if_same(objects, plan.seen, num_addresses)
    if addresses is None:
        return None
    addresses = addresses.reshape(2, -1)
    return addresses if addresses[0].tobytes() == plan.addresses else None


def _contents(batch: Batch, entries: Sequence[Entry], is_plain: bool) -> Contents:
    """Return what the entries of a batch depend on besides values and gradients."""
    states = batch.states
    if is_plain:
        return list(map(len, states)), list(chain.from_iterable(map(dict.values, states)))
    kinds = (one.kind for one in entries)
    found = list(map(contents_of, kinds, batch.params, states))
    return [keys for keys, _ in found], [one for _, contents in found for one in contents]
