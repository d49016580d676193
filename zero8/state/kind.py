# SPDX-License-Identifier: Apache-2.0
"""The contract of a kind of state: the interface to one way of keeping moments."""

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import Any

from torch import Tensor

from zero8.spec.algorithm import Algorithm
from zero8.state.header import Entries
from zero8.state.params import KnownParams, ParamInfo
from zero8.state.settings import Settings
from zero8.state.store import MomentStore

Contents = tuple[object, list[Tensor | float]]
"""A description of how to read a state, equal for equal readings, and its tensors and numbers."""


class StateKind(ABC):
    """A way of keeping the states of parameters, for one optimizer.

    The first of the optimizer's kinds that serves a parameter keeps its state.  The state of a
    parameter is its dictionary in `optimizer.state`; every kind keeps `step`, an int, and the
    algorithm's remembered numbers (`zero8.state.memory`) in it.  A kind chooses the other entries,
    which checkpoints must be able to carry and in which `moments` must find the `MomentStore`s.
    Other code may keep entries of its own beside them (`zero8.state.entries`).

    `info` describes the parameter.  It is None for a tensor by which a framework has replaced
    parameters, and which it removes from the groups between steps.
    """

    raises_alone = True
    """Whether a rank may raise by itself for gradients that are not finite: either all ranks do, or
    none waits for it."""

    def __init__(self, settings: Settings, params: KnownParams):
        """Serve an optimizer with these settings and parameters."""
        self.settings, self._params = settings, params
        # What ranks have agreed on, by a key that changes on all of them in the same step.
        self.agreed: dict[Hashable, Any] = {}

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the steps of its parameters."""
        return self.settings.algorithm

    @abstractmethod
    def serves(self, p: Tensor, state: Entries) -> bool:
        """Return whether the state of a parameter is of this kind.

        `state` has no entries of ours before its first step and during loading.
        """

    def process_group(self, p: Tensor) -> Any:
        """Return the ranks among which a parameter is cut, None if this rank has it whole."""
        return None

    def check_new(self, p: Tensor, info: ParamInfo) -> None:
        """Raise ValueError, before there is a state, if one can never be made for a parameter."""
        return

    @abstractmethod
    def new(self, p: Tensor, info: ParamInfo | None) -> Entries:
        """Return the state of a parameter that has taken no step; its moments decode to zeros."""

    @abstractmethod
    def moments(self, p: Tensor, state: Entries, info: ParamInfo | None) -> list[MomentStore]:
        """Return the live moments of a parameter that has state; steps change them in place.

        Float32 moments that other code has put into the state are encoded and replaced in it, and
        the remembered numbers are reset if something other than a step has changed moments.  Raises
        ValueError if the state is not one of this parameter; it is unchanged then.
        """

    @abstractmethod
    def adopted(self, p: Tensor, saved: Entries, info: ParamInfo | None) -> Entries:
        """Return a loaded state in new tensors, in the form that the optimizer keeps.

        Codes are kept verbatim if codec, block size and policy match the saved ones.  The
        correction of the parameter is among the entries if it needs one.  Raises ValueError if it
        does not fit the parameter.
        """

    def saved(self, p: Tensor, state: Entries, info: ParamInfo | None, in_fp32: bool) -> Entries:
        """Return the entries that checkpoints carry for a state, those of other code among them.

        `in_fp32` says whether the user asks for the entries of the fp32 optimizer.
        """
        return state

    wraps_tensors = False
    """Whether every step must ask `contents`, as entries wrap the tensors that it writes."""

    def contents(self, state: Entries) -> Contents:
        """Return what a step's records depend on in a state.

        The description may omit what the caller sees in the tensors: their addresses, dtypes, sizes
        and layouts, and the values of int64 tensors of at most `zero8.op.structs.MAX_HASHED`
        elements.
        """
        return tuple(state), list(state.values())
