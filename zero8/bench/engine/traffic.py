# SPDX-License-Identifier: Apache-2.0
"""The bytes that an engine's step moves in host memory, on a machine without a GPU.

They are not measured: they follow from what DeepSpeed 0.19, torch 2.13 and zero8 do, which
docs/how-it-works.md lists under "Around the step".  What ranks exchange is not among them.
"""

import math
from typing import NamedTuple

from zero8.algorithms.adam import ADAM
from zero8.bench.engine.engines import FSDP2, ZERO_STAGES, Case
from zero8.spec.codec import CODECS
from zero8.state.keywords import DEFAULTS

WEIGHT_BYTES = 2


class Entry(NamedTuple):
    """What an optimizer's step reads and writes, in bytes per parameter.

    Attributes:
        master: the parameter that it steps.
        states: its moments with scales, and corrections of weights.
        grad: its gradient.
        is_ours: whether the step itself clips, and writes the model's 16-bit weights.
    """

    master: float
    states: float
    grad: float
    is_ours: bool = False


class Traffic(NamedTuple):
    """Bytes per parameter.

    Attributes:
        step_bytes: read and written by the optimizer's step.
        rest_bytes: read and written by the passes around it.
    """

    step_bytes: float
    rest_bytes: float


def our_states() -> float:
    """Return the bytes of the moments with their scales, in whole blocks."""
    codec, block_size = CODECS[DEFAULTS["codec"]], DEFAULTS["block_size"]
    scales = sum(math.prod(codec.code_of(rule).scale_shape) for rule in ADAM.moments)
    return len(ADAM.moments) + 4 * scales / block_size


def traffic(case: Case, entry: Entry) -> Traffic:
    """Return the traffic of an engine's step."""
    step = 2 * (entry.master + entry.states) + entry.grad
    if case.engine == FSDP2:  # the norm, and the multiplication
        passes = entry.grad + (0 if entry.is_ours else 2 * entry.grad)
        return Traffic(step, passes if case.clipping else 0)
    is_sharded = ZERO_STAGES[case.engine] == 3
    if entry.is_ours:
        # In ZeRO-3 masters of the weights' dtype are the weights.
        are_weights = is_sharded and entry.master == WEIGHT_BYTES
        return Traffic(step + (0 if are_weights else WEIGHT_BYTES), 0)
    multiplied = 2 * entry.grad if case.clipping or is_sharded else 0
    to_buffer = entry.master + WEIGHT_BYTES  # in ZeRO-3 the weights themselves
    return Traffic(step, multiplied + to_buffer + (0 if is_sharded else 2 * WEIGHT_BYTES))
