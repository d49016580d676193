# SPDX-License-Identifier: Apache-2.0
"""The steps that the reference takes beside an optimizer, from what the documentation says."""

import math

import torch

from zero8.spec import dither, reference
from zero8.spec.algorithm import Algorithm
from zero8.spec.codec import CODECS
from zero8.spec.grid import BlockGrid
from zero8.spec.packing import packed
from zero8.spec.segment import Moment, Rounding, Segment

NAME, SHAPE, SEED = "layer.weight", (20, 300), 5


class ReferenceTwin:
    """The moments of a parameter of this name and shape, in an optimizer with this seed."""

    def __init__(self, algorithm: Algorithm, codec: str):
        self._algorithm, self._codec = algorithm, CODECS[codec]
        self._grid, self._memory = BlockGrid.of(SHAPE, 256), (0.0,) * len(algorithm.memory)
        self._codes = [self._codec.code_of(rule) for rule in algorithm.moments]
        self._moments = [self._zeros(code) for code in self._codes]

    def _zeros(self, code) -> Moment:
        codes = torch.full((math.prod(SHAPE),), code.zero_code, dtype=torch.uint8)
        scales = torch.zeros(self._grid.num_blocks, *code.scale_shape)
        return Moment(packed(codes, self._grid, 0, code.bits), scales)

    def step(self, number: int, param, grad, group: dict, rounding: Rounding) -> None:
        """Take a step; keys come from seed and name, phases from the step."""
        streams, identity = (*self._algorithm.moment_names, "param"), dither.identity_of(NAME)
        keys = [dither.stream_key(SEED, identity, stream) for stream in streams]
        *phases, param_phase = (dither.phase_of(key, number) for key in keys)
        for moment, phase in zip(self._moments, phases, strict=True):
            moment.phase = phase
        self._memory = self._algorithm.next_memory(number, self._memory, group)
        segment = Segment(
            param=param.detach().view(-1),
            grad=grad.view(-1),
            algorithm=self._algorithm,
            moments=self._moments,
            codec=self._codec,
            grid=self._grid,
            first=0,
            rounding=rounding,
            scalars=self._algorithm.scalars(number, self._memory, group, True),
            param_phase=param_phase,
        )
        assert reference.step(segment) == 0

    def assert_is(self, state: dict) -> None:
        """Assert that a state has these codes and scales."""
        names = self._algorithm.moment_names
        for name, code, moment in zip(names, self._codes, self._moments, strict=True):
            assert torch.equal(state[f"{name}_q{code.bits}"].view(-1), moment.values)
            assert torch.equal(state[f"{name}_scale"].view(moment.scales.shape), moment.scales)
