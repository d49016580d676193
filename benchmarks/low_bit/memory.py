# SPDX-License-Identifier: Apache-2.0
"""The memory of a model of 8B parameters by the kind of its optimizer's states.

The bytes are those of `zero8 plan --parameters 8B --engine fsdp2 --offload none` for one rank;
those of states in bfloat16, which the plan does not know, are computed from them.
"""

from functools import cache

from zero8.plan.memory import rows_of
from zero8.plan.model import Model
from zero8.plan.setup import INT8, PLAIN, Setup

SIZE = "8B"
CODECS = ("log", "log6", "linear4")
"""The codecs of zero8's states."""
STATES = ("float32", "bfloat16", *CODECS)
WEIGHTS = ("bfloat16", "INT8")


@cache
def _model() -> Model:
    return Model.of_size(SIZE)


def planned(dtype: str, codec: str, weights: str = PLAIN) -> dict[str, tuple[int, int]]:
    """Return the plan's bytes with float32 states and with a codec, by what they hold."""
    setup = Setup(engine="fsdp2", offload="none", dtype=dtype, weights=weights, codec=codec)
    return {row.what: (row.fp32_bytes, row.zero8_bytes) for row in rows_of(_model(), setup)}


def state_bytes(states: str) -> int:
    """Return the bytes of both moments."""
    if states in CODECS:
        return planned("bf16-masters", states)["moments"][1]
    float32_bytes = planned("bf16-masters", "log")["moments"][0]
    return float32_bytes if states == "float32" else float32_bytes // 2


def memory() -> dict:
    """Return the model's size, and the bytes of a row per kind of weights and of states."""
    rows = [_row("float32", "float32")]
    rows += [_row(weights, states) for weights in WEIGHTS for states in STATES]
    return {"parameters": _model().numel, "model": _model().title, "rows": rows}


def _row(weights: str, states: str) -> dict:
    dtype = "fp32" if weights == "float32" else "bf16-masters"
    plan = planned(dtype, "log", INT8 if weights == "INT8" else PLAIN)
    return {
        "weights": weights,
        "states": states,
        "weight_bytes": plan["weights"][0],
        "gradient_bytes": plan["gradients"][0],
        "state_bytes": state_bytes(states),
        "not_from_the_plan": ["states"] if states == "bfloat16" else [],
    }
