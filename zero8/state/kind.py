# SPDX-License-Identifier: Apache-2.0
"""The contract of a kind of state: what the optimizer asks of each way of keeping moments."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from zero8.state.header import Entries
from zero8.state.params import KnownParams, ParamInfo
from zero8.state.reencoded import Reencoded
from zero8.state.settings import Settings
from zero8.state.store import MomentStore

RecordKey = tuple[object, list[Tensor | float]]
"""What says how to read some states (equal where they read alike), and all their entries."""


class StateKind(ABC):
    """A way of keeping the states of parameters, for one optimizer.

    The optimizer asks its kinds in order which of them serves a parameter.  The state of a
    parameter is the dictionary that stands in `optimizer.state`; every kind keeps `step`, an int,
    and what the algorithm remembers (`zero8.state.memory`) in it.  All else is its own affair, as
    long as whole checkpoints can carry it and `moments` finds the `MomentStore`s in it.

    `info` is what is known of the parameter: None for what a framework has put in the place of some
    and takes out of the groups between steps.
    """

    raises_alone = True
    """Whether a rank may raise by itself where gradients are not finite: all others do too, or
    none waits for it."""

    remark = ""
    """What the memory report adds to the reason for the bits of a parameter."""

    def __init__(self, settings: Settings, params: KnownParams):
        """Serve an optimizer with these settings and parameters."""
        self._settings, self._params = settings, params
        self.reencoded = Reencoded()

    @abstractmethod
    def serves(self, p: Tensor, state: Entries) -> bool:
        """Return whether the state of a parameter is of this kind.

        Args:
            p: as it stands in the optimizer's groups.
            state: its state; empty before its first step, and while one is loaded.
        """

    def check_new(self, p: Tensor, info: ParamInfo) -> None:
        """Raise ValueError if states of a parameter can never be made, before there is one."""
        return

    @abstractmethod
    def new(self, p: Tensor, info: ParamInfo | None) -> Entries:
        """Return the state of a parameter that has taken no step; its moments decode to zeros."""

    @abstractmethod
    def moments(self, p: Tensor, state: Entries, info: ParamInfo | None) -> list[MomentStore]:
        """Return the live moments of a parameter that has state: steps change it through them.

        Moments that have arrived in float32, where something else has put them into the state, are
        encoded here, and replaced in the state.

        Raises:
            ValueError: if the state is not one of this parameter; it has not been changed then.
        """

    @abstractmethod
    def adopted(self, p: Tensor, saved: Entries, info: ParamInfo | None) -> Entries:
        """Return a loaded state in tensors of its own, in the form that the optimizer keeps.

        Codes are taken verbatim where codec, block size and policy agree with what was saved.

        Raises:
            ValueError: if it does not fit the parameter.
        """

    def correction(self, p: Tensor, saved: Entries, info: ParamInfo | None) -> Entries:
        """Return the entry of the corrections of a parameter in a loaded state, {} for none.

        Raises:
            ValueError: if it does not fit the parameter.
        """
        return self._settings.correction_from(p, saved)

    def saved(self, p: Tensor, state: Entries, in_fp32: bool) -> Entries:
        """Return the entries that checkpoints carry in the place of a state.

        Args:
            p: the parameter.
            state: its state; neither it nor its tensors may be changed.
            in_fp32: whether the user asks for those of the fp32 optimizer.
        """
        return state

    @abstractmethod
    def contents(self, states: Sequence[Entries]) -> RecordKey:
        """Return what a step's records depend on in states of this kind, quickly: at every step.

        The description need not say what tensors among the entries say: where they are and of what
        kind, and what is in int64 tensors of at most `zero8.op.structs.MAX_HASHED` elements.
        """

    @abstractmethod
    def note_writes(self, states: Sequence[Entries]) -> None:
        """Forget what is remembered where something other than a step has changed the moments."""


def kind_of(kinds: Sequence[StateKind], p: Tensor, state: Entries) -> StateKind:
    """Return the first of an optimizer's kinds that serves a parameter."""
    return next(kind for kind in kinds if kind.serves(p, state))
