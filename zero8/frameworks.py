# SPDX-License-Identifier: Apache-2.0
"""The interface between the optimizer and frameworks such as DeepSpeed and FSDP.

A framework shards parameters, or replaces them in the optimizer's groups.  It is registered here;
`zero8.known_frameworks` lists the supported ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero8.ranks.numbers import Group
from zero8.state.kind import StateKind
from zero8.state.params import shape_here
from zero8.state.whole import WholeTensor
from zero8.step.batch import local_grad


@dataclass
class Use:
    """Whether an optimizer is in use; frameworks keep this longer than the optimizer.

    Attributes:
        is_met: whether it has stepped, or an engine steps with it.
    """

    is_met: bool = False


class Framework:
    """A framework, as the optimizer sees it; this base class changes nothing."""

    kinds: tuple[type[StateKind], ...] = ()
    """The kinds of state of its parameters."""

    def fit(self, base_class: type, optimizer_class: type) -> None:
        """Make the framework work with the optimizer's class; called for every new optimizer.

        Args:
            base_class: the base class of all optimizers.
            optimizer_class: the new one's.
        """
        return

    def constructing_engine(self) -> object | None:
        """Return the framework's engine that is constructing the optimizer, None if none is."""
        return None

    def names_in(self, engine: object) -> Mapping[Tensor, str]:
        """Return an engine's names of parameters."""
        return {}

    def global_shape(self, p: Tensor) -> tuple[int, ...] | None:
        """Return the global shape of a parameter that the framework shards, else None."""
        return None

    def check_replaced(self, params: Sequence[Tensor]) -> None:
        """Raise ValueError if it has replaced these in an optimizer, which then takes no group."""
        return

    def claim(self, optimizer: torch.optim.Optimizer, params: Iterable[Tensor], use: Use) -> None:
        """Note that an optimizer was made for parameters without an engine."""
        return

    def process_groups(self, params: Iterable[Tensor]) -> list[Group]:
        """Return the groups of ranks that share parameters, [] if none are shared."""
        return []

    def shard_groups(self, p: Tensor) -> tuple[Group, ...]:
        """Return the groups over which sums over this rank's part are those over the parameter.

        They are added over these groups in turn; () for parameters that the framework leaves whole.

        Raises:
            ValueError: if the framework does not tell which part of the parameter this rank has.
        """
        return ()


_registered: list[Framework] = []


def register(framework: Framework) -> None:
    """Make all new optimizers support a framework."""
    _registered.append(framework)


def kinds() -> tuple[type[StateKind], ...]:
    """Return the kinds of state, in order: the first that serves a parameter keeps its state.

    Raises:
        RuntimeError: if no framework is registered: sharded parameters would be taken for whole.
    """
    if not _registered:
        raise RuntimeError(
            "zero8 could not register the frameworks that it supports; the warning of "
            "`import zero8` says why"
        )
    return (*(kind for framework in _registered for kind in framework.kinds), WholeTensor)


def fit(base_class: type, optimizer_class: type) -> None:
    """Make all frameworks work with the optimizer's class; see `Framework.fit`.

    Raises:
        RuntimeError: if a loaded framework lacks a needed interface.
    """
    for framework in _registered:
        framework.fit(base_class, optimizer_class)


def constructing_engine() -> tuple[object | None, Mapping[Tensor, str]]:
    """Return the engine that is constructing the optimizer, with its names, or None and {}."""
    for framework in _registered:
        engine = framework.constructing_engine()
        if engine is not None:
            return engine, framework.names_in(engine)
    return None, {}


def global_shape(p: Tensor) -> tuple[int, ...]:
    """Return the global shape of a parameter; see `shape_here` for those of lazy modules."""
    shapes = (framework.global_shape(p) for framework in _registered)
    return next((shape for shape in shapes if shape is not None), shape_here(p))


def check_replaced(params: Sequence[Tensor]) -> None:
    """Raise ValueError if a framework has replaced parameters, and would not step a new group."""
    for framework in _registered:
        framework.check_replaced(params)


def claim(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], use: Use) -> None:
    """Note in all frameworks that an optimizer was made for parameters."""
    for framework in _registered:
        framework.claim(optimizer, params, use)


def parts_of_grads(params: Iterable[Tensor]) -> dict[tuple[Group, ...], list[Tensor]]:
    """Return this rank's parts of gradients, by the groups over whose ranks they are sharded.

    A rank without gradients has the same groups, as sums over them are collectives.

    Raises:
        ValueError: see `Framework.shard_groups`.
    """
    parts: dict[tuple[Group, ...], list[Tensor]] = {}
    for p in params:
        groups = (group for framework in _registered for group in framework.shard_groups(p))
        grads = parts.setdefault(tuple(groups), [])
        if p.grad is not None:
            grads.append(local_grad(p, p.grad))
    return parts


def process_groups(params: Sequence[Tensor]) -> list[Group]:
    """Return the groups of ranks that share parameters, [] if none are shared."""
    return [group for framework in _registered for group in framework.process_groups(params)]
