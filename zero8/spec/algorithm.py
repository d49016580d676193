# SPDX-License-Identifier: Apache-2.0
"""The contract of an algorithm with states, kernels and optimizers."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from torch import Tensor

from zero8.spec.shown import shown

Group = Mapping[str, Any]
"""A parameter group of an optimizer."""


class Scalars(Protocol):
    """The scalars of one step: a NamedTuple of values computed in double and rounded to float32.

    Kernels see the step count and the hyperparameters only through them, so every kernel and the
    reference agree bit for bit.
    """

    @property
    def l2(self) -> float:
        """The L2 coefficient: the gradient gains l2 * parameter; 0 where decay is decoupled."""

    @property
    def grad_sign(self) -> float:
        """-1.0 to ascend, 1.0 to descend."""

    @property
    def grad_factor(self) -> float:
        """What gradients are multiplied by before anything else, such as a clipping factor."""

    def _replace(self, *, grad_factor: float) -> "Scalars":
        """Return the same with another factor, as NamedTuple does."""

    def __iter__(self) -> Iterator[float]:
        """Return an iterator of the values, in the order of csrc/algorithms.h."""

    def __hash__(self) -> int:
        """Scalars are hashable: kernels get equal ones once."""


@dataclass(frozen=True)
class MomentRule:
    """One moment of an algorithm.

    Attributes:
        algorithm: the algorithm's name in saved states.
        name: its entry in states, such as `exp_avg`; also the stream of its dither.
        is_signed: whether it can be negative.
        decay: the name of the scalar that multiplies the moment when it is decoded, or None.
        settling: the name of the scalar that settles its codes, which are the nearest, or says
            that the dither rounds them (`zero8.spec.log`); None if it always does.
    """

    algorithm: str
    name: str
    is_signed: bool
    decay: str | None = None
    settling: str | None = None

    @property
    def is_dithered(self) -> bool:
        """Whether codes that round by the dither do so for this moment."""
        return self.settling is None


@dataclass(frozen=True)
class Remembered:
    """A number that a state keeps from step to step beside its moments.

    Attributes:
        name: its entry in states.
        unknown: its largest value, for moments of unknown origin; before the first step it is 0.
    """

    name: str
    unknown: float


class Algorithm(ABC):
    """An algorithm; `zero8.spec.algorithms` lists them.

    Attributes:
        name: its name in saved states.
        number: its number in kernels and in plain states.
        class_name: its optimizer class, for messages.
        fp32_name: the fp32 optimizers whose states it loads, for messages.
        moments: the values kept per element, in the order of csrc/algorithms.h.
        memory: the numbers kept per parameter.
        options: the settings of a parameter group, with their defaults.
        keywords: the keywords of its optimizer, without those of every zero8 optimizer.
        no_effect_keys: keywords of the same algorithm elsewhere that select an implementation.
        step_if_unknown: the step number of fp32 states that lack it; None if they must have it.
        fp32_options: further settings in groups of fp32 optimizers, so that these can load our
            state dicts.
        scalars_type: the NamedTuple of a step's scalars, with the fields of csrc/algorithms.h.
        is_of_matrices: whether an update depends on the whole matrix (`zero8.optimizer.muon_step`).
    """

    name: str
    number: int
    class_name: str
    fp32_name: str
    moments: tuple[MomentRule, ...]
    memory: tuple[Remembered, ...] = ()
    options: Mapping[str, Any]
    keywords: tuple[str, ...]
    no_effect_keys: tuple[str, ...] = ()
    step_if_unknown: int | None = None
    fp32_options: Mapping[str, Any] = MappingProxyType({})
    scalars_type: type[Any]
    is_of_matrices: bool = False

    @property
    def kernel(self) -> "Algorithm":
        """The algorithm whose kernel computes this one's elementwise equations."""
        return self

    def fp32_group(self, group: Group) -> dict[str, Any]:
        """Return a group of ours as the fp32 optimizer reads it, where a name differs."""
        return dict(group)

    @abstractmethod
    def check(self, group: Group) -> None:
        """Raise ValueError unless the options of a group are valid; `zero8.spec.options` helps."""

    @abstractmethod
    def next_memory(self, step: int, memory: tuple[float, ...], group: Group) -> tuple[float, ...]:
        """Return a parameter's remembered numbers after step number `step`."""

    @abstractmethod
    def scalars(
        self, step: int, memory: tuple[float, ...], group: Group, bias_correction: bool
    ) -> Scalars:
        """Return the scalars of step number `step` (the first is 1).

        Args:
            step: the number of steps in the moments, this one included.
            memory: the remembered numbers after this step, from `next_memory`.
            group: the settings of the parameter's group.
            bias_correction: whether to correct the bias of the moments toward 0.
        """

    @abstractmethod
    def advance(self, s: Any, g: Tensor, moments: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return the new moments, and a tensor that `param` takes as `carried`.

        Args:
            s: the step's scalars.
            g: (numel,) float32, the gradients.
            moments: (numel,) float32 each, decoded and multiplied by their decays.
        """

    @abstractmethod
    def param(self, s: Any, p: Tensor, moments: Sequence[Tensor], carried: Tensor) -> Tensor:
        """Return the new parameters in float32, from the results of `advance`."""

    def moment(self, name: object) -> MomentRule:
        """Return the moment called `name`, or raise ValueError with the valid names."""
        for rule in self.moments:
            if rule.name == name:
                return rule
        raise ValueError(f"got {shown(name)}, expected one of {self.moment_names}")

    @property
    def moment_names(self) -> list[str]:
        """The names of the moments, in order."""
        return [rule.name for rule in self.moments]
