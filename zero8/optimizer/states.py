# SPDX-License-Identifier: Apache-2.0
"""An optimizer's states of parameters, each read and written through its kind."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from zero8.deepspeed.flat_state import FlatPartition
from zero8.environment import ranks
from zero8.optimizer.batch import Beside, Group
from zero8.optimizer.check import check_new, check_replaceable
from zero8.optimizer.loading import as_torch_casts
from zero8.spec.algorithm import Algorithm
from zero8.spec.options import plain
from zero8.state import keywords
from zero8.state.entries import first_entries, is_new, others_in, param_states
from zero8.state.fsdp import FlattenedTensor, ShardedTensor
from zero8.state.grads import grad_bytes_by_dtype
from zero8.state.header import Entries
from zero8.state.kind import StateKind
from zero8.state.memory_report import MemoryReport
from zero8.state.params import KnownParams, ParamInfo
from zero8.state.settings import Settings
from zero8.state.store import MomentStore
from zero8.state.whole import WholeTensor

KINDS: tuple[type[StateKind], ...] = (ShardedTensor, FlattenedTensor, FlatPartition, WholeTensor)
"""The kinds of state: the first that serves a parameter keeps its state."""


class HoldsStates(torch.optim.Optimizer):
    """An optimizer with the states of its parameters.

    Attributes:
        algorithms: the algorithms of its groups.
        algorithm_of: returns that of a group.
        settings: the settings of the whole optimizer.
        kinds: the kinds of state (`KINDS`) of each of its algorithms.
        beside: what steps beside the calls of `step`; None if they step themselves.
    """

    algorithms: ClassVar[tuple[Algorithm, ...]]
    algorithm_of: Callable[[Group], Algorithm]
    settings: Settings
    kinds: list[StateKind]
    beside: Beside | None
    _params: KnownParams

    def _begin(self) -> None:
        """Create run-time members, which pickling omits."""
        self._params, self.beside = KnownParams(), None
        self.kinds = [
            kind(replace(self.settings, algorithm_name=algorithm.name), self._params)
            for algorithm in self.algorithms
            for kind in KINDS
        ]

    @property
    def states(self) -> dict[Tensor, Entries]:
        """The states of parameters that have moments; other code may keep more in `state`."""
        self._wait()
        return param_states(self.state)

    def infos(self, groups: Iterable[Group] | None = None) -> dict[Tensor, ParamInfo]:
        """Return the descriptions of the parameters in groups, by default the optimizer's."""
        return self._params.infos(self.param_groups if groups is None else groups)

    def kind_of(self, p: Tensor, state: Entries, algorithm: Algorithm | None = None) -> StateKind:
        """Return the kind of a parameter's state; of an empty one, also by its algorithm."""
        algorithm = self._algorithm_in(state) or algorithm or self.algorithms[0]
        kinds = (one for one in self.kinds if one.algorithm is algorithm)
        return next(one for one in kinds if one.serves(p, state))

    def _algorithm_in(self, state: Entries) -> Algorithm | None:
        """Return the algorithm whose moments are in a state, None if it has none."""
        found = (one for one in self.algorithms if not first_entries(one).isdisjoint(state))
        return next(found, None)

    def _check_algorithms(self, states: Mapping[Tensor, Entries]) -> None:
        """Raise ValueError if a state is not one of the algorithm of its parameter's group."""
        if len(self.algorithms) == 1:
            return
        for group in self.param_groups:
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

    def _check_new(self, group: Group, *, is_replaced: bool) -> None:
        """Raise ValueError for a parameter of a new group that can never step.

        `is_replaced` says whether DeepSpeed will replace them, by partitions or float32 copies.
        """
        infos, algorithm = self.infos(), self.algorithm_of(group)
        for p in group["params"]:
            info = infos[p]
            self.settings.decide(info)
            if is_replaced:
                check_replaceable(info.label, p)
            elif p.requires_grad:
                check_new(info.label, p, algorithm, self.settings)
                self.kind_of(p, {}, algorithm).check_new(p, info)

    def _raise_alone(self) -> bool:
        """Return whether this rank may raise by itself for numbers that are not finite."""
        if not all(self.kind_of(*pair).raises_alone for pair in param_states(self.state).items()):
            return False
        # Ranks with equal gradients raise at the same step, unless the counts of a GPU arrive late.
        return ranks.num_ranks() == 1 or not self._are_on_gpus()

    def _are_on_gpus(self) -> bool:
        return any(p.is_cuda for p in self._all_params())

    def moments(self, p: Tensor) -> list[MomentStore]:
        """Return the live moments of a parameter that has state, in the algorithm's order."""
        self._wait()
        state = self.state[p]
        return self.kind_of(p, state).moments(p, state, self.infos().get(p))

    def all_moments(self) -> dict[Tensor, list[MomentStore]]:
        """Return the `moments` of every parameter that has state."""
        infos = self.infos()
        return {p: self.kind_of(p, s).moments(p, s, infos.get(p)) for p, s in self.states.items()}

    def memory_report(self) -> MemoryReport:
        """Return the bits and bytes of each parameter's moments, the reason, and gradient bytes."""
        rows = []
        why = self._params.why_float32(self.param_groups)
        for p, stores in self.all_moments().items():
            rows += self.settings.memory_rows(stores, "param_correction" in self.state[p], why)
        return MemoryReport(tuple(rows), grad_bytes_by_dtype(self.states))

    def _save(self, packed: dict[str, Any], in_fp32: bool) -> None:
        """Bring the states in a state dict of torch's to the form that checkpoints carry."""
        infos = self.infos()
        params = [p for group in self.param_groups for p in group["params"]]
        for number, p in enumerate(params):  # torch saves one that is there twice by its first
            state = packed["state"].get(number)
            if isinstance(state, dict) and not is_new(state):
                kind = self.kind_of(p, state)
                packed["state"][number] = kind.saved(p, state, infos[p], in_fp32)

    def _adopt(self, states: Mapping[Tensor, Entries]) -> dict[Tensor, Entries]:
        """Return the states of a state dict as kept; check its groups, which are loaded already."""
        for group in self.param_groups:
            if "capturable" in group:
                # Only torch's AdamW needs it, for steps that are captured or compiled.
                group["capturable"] = False
            group.update(plain(group))
            full = {**self.defaults, **group}
            keywords.check_group(self.algorithm_of(group), type(self).__name__, full)
        self._check_algorithms(states)
        infos = self.infos()
        return {p: self._adopted_with_others(p, s, infos.get(p)) for p, s in states.items()}

    def _adopted_with_others(self, p: Tensor, saved: Entries, info: ParamInfo | None) -> Entries:
        """Return a loaded state as this optimizer keeps it, and other code's as torch casts it."""
        algorithm = self._algorithm_in(saved) or self.algorithms[0]
        others = others_in(saved, algorithm).items()
        kept = {key: as_torch_casts(p, key, value) for key, value in others}
        return kept if is_new(saved) else kept | self.adopted(p, saved, info)

    def adopted(self, p: Tensor, saved: Entries, info: ParamInfo | None) -> Entries:
        """Return a loaded state of a parameter as this optimizer keeps it, in new tensors."""
        if "state1" in saved:
            raise ValueError(
                f"state of {p if info is None else info.label}: got one of bitsandbytes; convert "
                "the file first: zero8 checkpoint convert IN OUT --to plain"
            )
        return self.kind_of(p, {}, self._algorithm_in(saved)).adopted(p, saved, info)

    def _wait(self) -> None:
        """Wait for pending steps."""
        if self.beside is not None:
            self.beside.wait()

    def _all_params(self) -> list[Tensor]:
        """Return the parameters of all groups, each once."""
        return list(dict.fromkeys(p for group in self.param_groups for p in group["params"]))
