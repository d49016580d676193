# SPDX-License-Identifier: Apache-2.0
"""The kind of state of a whole parameter: entries that `zero8.state.plain` defines."""

import math

from torch import Tensor

from zero8.state.entries import others_in
from zero8.state.extent import Extent, local
from zero8.state.header import Entries, StateHeader
from zero8.state.kind import StateKind
from zero8.state.params import ParamInfo
from zero8.state.plain import float32_form, saved_form, stores_of
from zero8.state.store import MomentStore
from zero8.state.table import Piece
from zero8.state.target import Target
from zero8.state.tell import tell_once

_KNOWN = "only flat partitions, which another kind serves, have no ParamInfo"


class WholeTensor(StateKind):
    """Plain tensors with codes shaped as the parameter, for parameters that are not sharded.

    Ranks that replicate such a parameter have equal states and get equal gradients.
    """

    def serves(self, p: Tensor, state: Entries) -> bool:
        """Return True: this kind comes last, and serves all that the others do not."""
        return True

    def new(self, p: Tensor, info: ParamInfo | None) -> Entries:
        """See `StateKind`."""
        parameter = self._parameter(info)
        if self.algorithm.is_of_matrices and len(parameter.shape) < 2:
            raise ValueError(
                f"use_muon: got parameter {parameter.name} of shape {parameter.shape}, expected 2 "
                "dimensions or more; put it into a group with use_muon false"
            )
        return self._target(p, parameter).new()

    def moments(self, p: Tensor, state: Entries, info: ParamInfo | None) -> list[MomentStore]:
        """See `StateKind`."""
        target = self._live(p, state, info)
        return stores_of(state, target.extent, target.parameter.name)

    def adopted(self, p: Tensor, saved: Entries, info: ParamInfo | None) -> Entries:
        """See `StateKind`; moments of an fp32 optimizer are encoded."""
        target, key = self._target(p, self._parameter(info)), "param_correction"
        adopted, extent = target.adopted(saved), target.extent
        if isinstance(saved.get(key), Tensor):
            part = extent.part_of(key, saved[key], extent.shape, extent.box)
            saved = {key: part}
        kept = self.settings.correction_from(local(p), saved)
        return adopted | {
            key: extent.entry(correction, extent.shape, extent.box)
            for key, correction in kept.items()
        }

    def saved(self, p: Tensor, state: Entries, info: ParamInfo | None, in_fp32: bool) -> Entries:
        """See `StateKind`."""
        extent = self._live(p, state, info).extent
        if not in_fp32:
            return saved_form(state, extent)
        if "param_correction" in state:
            tell_once("zero8: state dicts in fp32 have no corrections of bfloat16 weights")
        return {**others_in(state, self.algorithm), **float32_form(state, extent)}

    def _live(self, p: Tensor, state: Entries, info: ParamInfo | None) -> Target:
        """Return the form of a live state, to which what other code has assigned is brought."""
        _bring_format_to_host(state)
        parameter = self._parameter(info)
        if "format" in state:
            parameter = StateHeader.of(state, parameter.name).piece(parameter.name)
        target = self._target(p, parameter)
        target.take_assigned(state, check_values=self.raises_alone)
        return target

    def _target(self, p: Tensor, parameter: Piece) -> Target:
        algorithm, codec = self.settings.algorithm, self.settings.codec
        return Target(algorithm, codec, parameter, self._extent(p, parameter), p.device)

    def _extent(self, p: Tensor, parameter: Piece) -> Extent:
        """Return this rank's part of a parameter; `parameter` is the whole one as a piece."""
        return Extent.whole(parameter.shape)

    def _parameter(self, info: ParamInfo | None) -> Piece:
        """Return the whole parameter as a piece."""
        assert info is not None, _KNOWN
        return self.settings.piece(info, 0, math.prod(info.shape), 0)


def _bring_format_to_host(state: Entries) -> None:
    header = state.get("format")  # the user may have moved the whole state to another device
    if isinstance(header, Tensor) and not header.is_meta:
        state["format"] = header.cpu()
