# SPDX-License-Identifier: Apache-2.0
"""The contract of an algorithm with states, kernels and optimizers."""

from abc import ABC, abstractmethod
from collections import namedtuple
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from zero8.spec.options import check_option
from zero8.spec.shown import shown

Group = Mapping[str, Any]
"""A parameter group of an optimizer."""

UNKNOWN = 3.4e38
"""The largest remembered number, that of moments of unknown origin."""

Scalars: TypeAlias = Any
"""The scalars of one step: a named tuple with the fields of csrc/algorithms.h, in its order.

Their values are computed in double and rounded to float32.  Kernels see the step count and the
hyperparameters only through them, so every kernel and the reference agree bit for bit.  After
those of the algorithm all have `decay`, by which weights are multiplied; `l2`, which is 0 where
decay is decoupled; `grad_sign`, -1 to ascend; and `grad_factor`, by which gradients are multiplied
before anything else.
"""


@dataclass(frozen=True)
class MomentRule:
    """One moment of an algorithm."""

    algorithm: str  # its name in saved states
    name: str  # the moment's entry in states, such as `exp_avg`; also the stream of its dither
    is_signed: bool  # whether it can be negative
    decay: str | None = None  # the scalar that multiplies the moment when it is decoded
    # Whether the dither always rounds its codes, where a codec has one; if not, the scalar
    # `settling` settles them or says that it does (`zero8.spec.log`).
    is_dithered: bool = True


class Algorithm(ABC):
    """An algorithm; `zero8.spec.algorithms` lists them."""

    name: str  # in saved states
    number: int  # in kernels and in plain states
    class_name: str  # its optimizer class, for messages
    fp32_name: str  # the fp32 optimizers whose states it loads, for messages
    moments: tuple[MomentRule, ...]  # in the order of csrc/algorithms.h
    # The names of numbers that states keep beside moments, from 0 before the first step to UNKNOWN.
    memory: tuple[str, ...] = ()
    options: Mapping[str, Any]  # the settings of a parameter group, with their defaults
    keywords: tuple[str, ...]  # of its optimizer, without those of every zero8 optimizer
    no_effect_keys: tuple[str, ...] = ()  # keywords elsewhere that select an implementation
    step_if_unknown: int | None = None  # of fp32 states that lack it; None if they must have it
    # Further settings in groups of fp32 optimizers, so that these can load our state dicts.
    fp32_options: Mapping[str, Any] = MappingProxyType({})
    is_of_matrices: bool = False  # whether an update depends on the whole matrix: muon_step.py

    @property
    def kernel(self) -> "Algorithm":
        """The algorithm whose kernel computes this one's elementwise equations."""
        return self

    def fp32_group(self, group: Group) -> dict[str, Any]:
        """Return a group of ours as the fp32 optimizer reads it, where a name differs."""
        return dict(group)

    def check(self, group: Group) -> None:
        """Raise ValueError unless the options of a group are valid."""
        for name, default in self.options.items():
            check_option(name, group[name], default)

    def next_memory(self, step: int, memory: tuple[float, ...], group: Group) -> tuple[float, ...]:
        """Return a parameter's remembered numbers after step number `step`."""
        return memory

    @abstractmethod
    def exact_scalars(
        self, step: int, memory: tuple[float, ...], group: Group, bias_correction: bool
    ) -> dict[str, float]:
        """Return the scalars of step number `step` (the first is 1), but `grad_factor`, in double.

        `memory` are the remembered numbers after this step, `bias_correction` says whether to
        correct the bias of the moments toward 0.
        """

    @cached_property
    def scalars_type(self) -> Any:
        """The class of this algorithm's scalars."""
        memory = (0.0,) * len(self.memory)
        names = [*self.exact_scalars(1, memory, self.options, True), "grad_factor"]
        return namedtuple(f"{type(self).__name__}Scalars", names)

    def scalars(
        self, step: int, memory: tuple[float, ...], group: Group, bias_correction: bool
    ) -> Scalars:
        """Return the scalars of a step as kernels have them; see `exact_scalars`."""
        exact = [*self.exact_scalars(step, memory, group, bias_correction).values(), 1.0]
        return self.scalars_type(*np.array(exact, np.float32).tolist())

    @abstractmethod
    def step(
        self, s: Any, p: Tensor, g: Tensor, moments: Sequence[Tensor]
    ) -> tuple[list[Tensor], Tensor]:
        """Return the new moments and the new parameters.

        All tensors are (numel,) float32; `moments` are decoded and multiplied by their decays.
        """

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
