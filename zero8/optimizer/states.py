# SPDX-License-Identifier: Apache-2.0
"""The states of an optimizer's parameters, each read and written through its kind."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from zero8.deepspeed.flat_state import FlatPartition
from zero8.environment import numbers
from zero8.optimizer.batch import Group
from zero8.optimizer.check import check_new, check_replaceable
from zero8.optimizer.loading import as_torch_casts
from zero8.spec.algorithm import Algorithm
from zero8.spec.options import plain
from zero8.state import keywords
from zero8.state.entries import first_entries, is_new, others_in, param_states
from zero8.state.fsdp import FlattenedTensor, ShardedTensor
from zero8.state.grads import grad_bytes_by_dtype
from zero8.state.header import Entries
from zero8.state.kind import StateKind, kind_of
from zero8.state.memory_report import MemoryReport
from zero8.state.params import KnownParams, ParamInfo
from zero8.state.settings import Settings
from zero8.state.store import MomentStore
from zero8.state.whole import WholeTensor

KINDS: tuple[type[StateKind], ...] = (ShardedTensor, FlattenedTensor, FlatPartition, WholeTensor)
"""The kinds of state: the first that serves a parameter keeps its state."""


class States:
    """The states of an optimizer's parameters.

    Attributes:
        optimizer: the optimizer.
        settings: its settings.
        algorithm_of: returns the algorithm of one of its groups.
        params: the parameters.
        kinds: the kinds of state (`KINDS`) of each algorithm.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        algorithms: Sequence[Algorithm],
        algorithm_of: Callable[[Mapping[str, Any]], Algorithm],
    ):
        """Start without parameters."""
        self.optimizer, self.settings = optimizer, settings
        self._algorithms, self.algorithm_of = algorithms, algorithm_of
        self.params = KnownParams()
        self.kinds = [
            kind(replace(settings, algorithm_name=algorithm.name), self.params)
            for algorithm in algorithms
            for kind in KINDS
        ]

    def infos(self, groups: Iterable[Group] | None = None) -> dict[Tensor, ParamInfo]:
        """Return the descriptions of the parameters in groups, by default the optimizer's."""
        return self.params.infos(self.optimizer.param_groups if groups is None else groups)

    def all(self) -> dict[Tensor, Entries]:
        """Return the states of parameters that have moments; other code may keep more."""
        return param_states(self.optimizer.state)

    def kind_of(self, p: Tensor, state: Entries, group: Group | None = None) -> StateKind:
        """Return the kind of a parameter's state; `state` is empty if it has none.

        The group is needed only of a parameter that is not in the optimizer's groups.
        """
        if len(self._algorithms) == 1:
            return kind_of(self.kinds, p, state)
        algorithm = self._algorithm_in(state)
        if algorithm is None:
            group = group or self.params.group_of(p, self.optimizer.param_groups)
            algorithm = self.algorithm_of(group)
        return kind_of([one for one in self.kinds if one.algorithm is algorithm], p, state)

    def _algorithm_in(self, state: Entries) -> Algorithm | None:
        """Return the algorithm whose moments are in a state, None if it has none."""
        found = (one for one in self._algorithms if not first_entries(one).isdisjoint(state))
        return next(found, None)

    def check_algorithms(self, states: Mapping[Tensor, Entries]) -> None:
        """Raise ValueError if a state is not one of the algorithm of its parameter's group."""
        if len(self._algorithms) == 1:
            return
        for group in self.optimizer.param_groups:
            algorithm = self.algorithm_of(group)
            for p in group["params"]:
                theirs = self._algorithm_in(states.get(p, {}))
                if theirs not in (None, algorithm):
                    raise ValueError(
                        f"parameter {self.infos()[p].label}: got a state of "
                        f"{theirs.class_name} in a group that {algorithm.class_name} steps "
                        "(use_muon was switched, or the parameter was moved); to go on so, drop "
                        "its state, and it starts anew: del optimizer.state[p]"
                    )

    def check_new(self, group: Mapping[str, Any], *, is_replaced: bool) -> None:
        """Raise ValueError for a parameter of a new group that can never step.

        `is_replaced` says whether DeepSpeed will replace them, by partitions or float32 copies.
        """
        infos, algorithm = self.infos(), self.algorithm_of(group)
        for p in group["params"]:
            info = infos[p]
            self.settings.decide(info)
            if is_lazy(p):
                continue  # a step checks it, which its module has materialized by then
            if is_replaced:
                check_replaceable(info.label, p)
            elif p.requires_grad:
                check_new(info.label, p, algorithm, self.settings)
                self.kind_of(p, {}).check_new(p, info)

    def raise_alone(self) -> bool:
        """Return whether this rank may raise by itself for numbers that are not finite."""
        if not all(self.kind_of(*pair).raises_alone for pair in self.all().items()):
            return False
        # Ranks with equal gradients raise at the same step, unless the counts of a GPU arrive late.
        return numbers.num_ranks() == 1 or not self._are_on_gpus()

    def _are_on_gpus(self) -> bool:
        groups = self.optimizer.param_groups
        return any(p.is_cuda for group in groups for p in group["params"])

    def moments(self, p: Tensor, infos: Mapping[Tensor, ParamInfo]) -> list[MomentStore]:
        """Return the live moments of a parameter that has state, in the algorithm's order."""
        state = self.optimizer.state[p]
        return self.kind_of(p, state).moments(p, state, infos.get(p))

    def all_moments(self) -> dict[Tensor, list[MomentStore]]:
        """Return the `moments` of every parameter that has state."""
        infos = self.infos()
        return {p: self.moments(p, infos) for p in self.all()}

    def memory_report(self) -> MemoryReport:
        """See `BlockwiseOptimizer`."""
        rows = []
        why = self.params.why_float32(self.optimizer.param_groups)
        for p, stores in self.all_moments().items():
            state = self.optimizer.state[p]
            remark = self.kind_of(p, state).remark
            rows += self.settings.memory_rows(stores, "param_correction" in state, why, remark)
        return MemoryReport(tuple(rows), grad_bytes_by_dtype(self.all()))

    def save(self, packed: dict[str, Any], in_fp32: bool) -> None:
        """Bring the states in a state dict of torch's to the form that checkpoints carry."""
        infos = self.infos()
        params = [p for group in self.optimizer.param_groups for p in group["params"]]
        for number, p in enumerate(params):  # torch saves one that is there twice by its first
            state = packed["state"].get(number)
            if isinstance(state, dict) and not is_new(state):
                kind = self.kind_of(p, state)
                packed["state"][number] = kind.saved(p, state, infos[p], in_fp32)

    def adopt(self, states: Mapping[Tensor, Entries]) -> dict[Tensor, Entries]:
        """Return the states of a state dict as kept; check its groups, which are loaded already."""
        for group in self.optimizer.param_groups:
            if "capturable" in group:
                # Only torch's AdamW needs it, for steps that are captured or compiled.
                group["capturable"] = False
            group.update(plain(group))
            full = {**self.optimizer.defaults, **group}
            keywords.check_group(self.algorithm_of(group), type(self.optimizer).__name__, full)
        self.check_algorithms(states)
        infos = self.infos()
        return {p: self._adopted_with_others(p, s, infos.get(p)) for p, s in states.items()}

    def _adopted_with_others(self, p: Tensor, saved: Entries, info: ParamInfo | None) -> Entries:
        """Return a loaded state as this optimizer keeps it, and other code's as torch casts it."""
        if info is not None and is_lazy(p):
            raise ValueError(
                f"state of {info.label}: got one of a parameter whose lazy module has seen no "
                "input yet; call the model on a batch before load_state_dict"
            )
        others = others_in(saved, self.kind_of(p, {}).algorithm)
        kept = {key: as_torch_casts(p, key, value) for key, value in others.items()}
        return kept if is_new(saved) else kept | self.adopted(p, saved, info)

    def adopted(self, p: Tensor, saved: Entries, info: ParamInfo | None) -> Entries:
        """Return a loaded state of a parameter as this optimizer keeps it, in new tensors."""
        if "state1" in saved:
            raise ValueError(
                f"state of {p if info is None else info.label}: got one of bitsandbytes; convert "
                "the file first: zero8 checkpoint convert IN OUT --to plain"
            )
        return self.kind_of(p, {}).adopted(p, saved, info)
