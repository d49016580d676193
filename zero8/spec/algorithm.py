# SPDX-License-Identifier: Apache-2.0
"""The contract of an algorithm: what the state, the kernels and the optimizer ask of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from zero8.spec.shown import shown

Group = Mapping[str, Any]
"""A parameter group of an optimizer."""


class Scalars(Protocol):
    """What one step of an algorithm needs besides tensors: a NamedTuple of float32 values.

    Computed in double and handed over as float32.  Nothing in a kernel depends on the step count or
    on hyper-parameters except through it, so every kernel and the reference agree bit for bit.
    """

    @property
    def l2(self) -> float:
        """What is added to the gradient per unit of the parameter; 0 where decay is decoupled."""

    @property
    def grad_sign(self) -> float:
        """-1.0 to ascend, 1.0 to descend."""

    @property
    def grad_factor(self) -> float:
        """What gradients are multiplied by before anything else, such as a clipping factor."""

    def _replace(self, *, grad_factor: float) -> "Scalars":
        """Return the same with another factor, as NamedTuple does."""

    def __hash__(self) -> int:
        """Equal scalars are handed over once."""


@dataclass(frozen=True)
class MomentRule:
    """One moment of an algorithm.

    Attributes:
        algorithm: what saved states call the algorithm.
        name: its entry in states, such as `exp_avg`; also the stream of its dither.
        is_signed: whether it can be negative.
        decay: which of the scalars the stored moment is multiplied by when it is decoded, None for
            none.
        settling: which of them is the settling of its encoding (`zero8.spec.log`), None for none.
    """

    algorithm: str
    name: str
    is_signed: bool
    decay: str | None = None
    settling: str | None = None


@dataclass(frozen=True)
class Remembered:
    """A number that a state keeps from step to step beside its moments.

    Attributes:
        name: its entry in states.
        unknown: its largest value, which holds for moments that no counted steps have made; it is 0
            before the first step.
    """

    name: str
    unknown: float


class Algorithm(ABC):
    """An algorithm; `zero8.algorithms.table` lists them.

    Attributes:
        name: what saved states call it.
        number: the same in kernels and in plain states.
        class_name: of its optimizer, for messages.
        fp32_name: what messages call the fp32 optimizers whose states it takes.
        moments: what it remembers of each element, in the order of csrc/algorithms.h.
        memory: what it remembers of each parameter.
        options: the settings of a parameter group, and what they are by default.
        keywords: those of its optimizer, but for what every optimizer of zero8 takes.
        needs_step: whether a step depends on its number, but for dithers; else fp32 states may have
            none.
        fp32_options: what groups of fp32 optimizers have besides, so that state dicts go either
            way.
        scalars_type: the NamedTuple of a step's scalars, field by field those of csrc/algorithms.h.
    """

    name: str
    number: int
    class_name: str
    fp32_name: str
    moments: tuple[MomentRule, ...]
    memory: tuple[Remembered, ...] = ()
    options: Mapping[str, Any]
    keywords: tuple[str, ...]
    needs_step: bool = True
    fp32_options: Mapping[str, Any] = MappingProxyType({})
    scalars_type: type[Any]

    @abstractmethod
    def next_memory(self, memory: tuple[float, ...], group: Group) -> tuple[float, ...]:
        """Return what is remembered of a parameter after one more step."""

    @abstractmethod
    def scalars(
        self, step: int, memory: tuple[float, ...], group: Group, bias_correction: bool
    ) -> Scalars:
        """Return the scalars of step number `step` (the first is 1).

        Args:
            step: how many steps the moments will have seen after this one.
            memory: after this step, from `next_memory`.
            group: the settings of the parameter's group.
            bias_correction: whether moments are divided by what is missing in their weights.
        """

    @abstractmethod
    def advance(self, s: Any, g: Tensor, moments: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return the new moments, and what `param` needs besides them.

        Args:
            s: the step's scalars.
            g: (numel,) float32, the gradients.
            moments: (numel,) float32 each, decoded and multiplied by their decays.
        """

    @abstractmethod
    def param(self, s: Any, p: Tensor, moments: Sequence[Tensor], carried: Tensor) -> Tensor:
        """Return the new parameters, float32, not rounded yet; arguments as `advance` has them."""

    def moment(self, name: object) -> MomentRule:
        """Return the moment called `name`, or raise ValueError with the names there are."""
        for rule in self.moments:
            if rule.name == name:
                return rule
        raise ValueError(f"got {shown(name)}, expected one of {self.moment_names}")

    @property
    def moment_names(self) -> list[str]:
        """The names of the moments, in order."""
        return [rule.name for rule in self.moments]
