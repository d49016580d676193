# SPDX-License-Identifier: Apache-2.0
"""What frameworks tell the optimizer, which knows none of them.

A framework shards parameters, or puts others in their place in the optimizer's groups.  It
registers itself here; `zero8.known_frameworks` lists those that zero8 serves.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero8.ranks.numbers import Group
from zero8.state.kind import StateKind
from zero8.state.whole import WholeTensor


@dataclass
class Use:
    """Whether anything steps with an optimizer; frameworks keep it longer than the optimizer.

    Attributes:
        is_met: whether it has stepped, or is the one that an engine steps with.
    """

    is_met: bool = False


class Framework:
    """A framework, as far as the optimizer has to do with it; this one has no wishes."""

    kinds: tuple[type[StateKind], ...] = ()
    """The kinds of state of what it puts in the place of parameters."""

    def fit(self, optimizer_class: type) -> None:
        """Fit the optimizer's class into the framework; called whenever an optimizer is made."""
        return

    def constructing_engine(self) -> object | None:
        """Return the framework's engine that is making the optimizer, None if none is."""
        return None

    def names_in(self, engine: object) -> Mapping[Tensor, str]:
        """Return what an engine calls parameters."""
        return {}

    def global_shape(self, p: Tensor) -> tuple[int, ...] | None:
        """Return the shape of a parameter of which there is only a part here, None of others."""
        return None

    def claim(self, optimizer: torch.optim.Optimizer, params: Iterable[Tensor], use: Use) -> None:
        """Note that an optimizer was made for parameters, by no engine."""
        return

    def process_groups(self, params: Iterable[Tensor]) -> list[Group]:
        """Return the groups of ranks that share parameters, [] if none are shared."""
        return []


_registered: list[Framework] = []


def register(framework: Framework) -> None:
    """Have all optimizers that are made from now on serve a framework."""
    _registered.append(framework)


def kinds() -> tuple[type[StateKind], ...]:
    """Return the kinds of state in the order in which they are asked whether a parameter is theirs.

    Raises:
        RuntimeError: if no framework is registered: sharded parameters would be taken for whole.
    """
    if not _registered:
        raise RuntimeError(
            "zero8 could not register the frameworks that it serves; the warning of `import zero8` "
            "says why"
        )
    return (*(kind for framework in _registered for kind in framework.kinds), WholeTensor)


def fit(optimizer_class: type) -> None:
    """Fit the optimizer's class into all frameworks.

    Raises:
        RuntimeError: if one that is loaded does not fit.
    """
    for framework in _registered:
        framework.fit(optimizer_class)


def constructing_engine() -> tuple[object | None, Mapping[Tensor, str]]:
    """Return the engine that is making the optimizer and its names of parameters; None and {}."""
    for framework in _registered:
        engine = framework.constructing_engine()
        if engine is not None:
            return engine, framework.names_in(engine)
    return None, {}


def global_shape(p: Tensor) -> tuple[int, ...]:
    """Return the global shape of a parameter."""
    shapes = (framework.global_shape(p) for framework in _registered)
    return next((shape for shape in shapes if shape is not None), tuple(p.shape))


def claim(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], use: Use) -> None:
    """Note in all frameworks that an optimizer was made for parameters."""
    for framework in _registered:
        framework.claim(optimizer, params, use)


def process_groups(params: Sequence[Tensor]) -> list[Group]:
    """Return the groups of ranks that share parameters, [] if none are shared."""
    return [group for framework in _registered for group in framework.process_groups(params)]
