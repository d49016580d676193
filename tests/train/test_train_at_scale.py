# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from ranks import build_ops

from examples.gpt import at_scale
from examples.gpt.engine import DEFAULTS, TWINS

NUMEL = 2**18


@pytest.fixture(scope="module", autouse=True)
def ops():
    build_ops()


# DeepSpeed's Lion has a second one, which it never reads.
MOMENTS_OF_TWIN = {"AdamW": 2, "Lion": 2, "SGD": 1, "Muon": 1}
MOMENTS = {
    "Adam8bitBlockwise": 2,
    "Lion8bitBlockwise": 1,
    "SGD8bitBlockwise": 1,
    "Muon8bitBlockwise": 1,
}
COMPILED = ("Lion8bitBlockwise", "Muon8bitBlockwise")
"""Those whose twins in DeepSpeed are compiled in a minute or more."""


@pytest.mark.parametrize(
    ("engine", "optimizer"),
    [
        pytest.param(*pair, marks=pytest.mark.slow) if pair[1] in COMPILED else pair
        for pair in [(engine, name) for engine, of_one in DEFAULTS.items() for name in of_one]
    ],
)
def test_at_scale_counts_the_memory_of_both_optimizers_and_times_them(engine, optimizer):
    result = at_scale.measure(engine, optimizer, "log", numel=NUMEL, rounds=2)
    twin = TWINS[optimizer]
    assert json.loads(json.dumps(result)) == result
    assert (result["numel"], result["rounds"]) == (NUMEL, 2)
    fp32, quantized = result["rows"]
    assert (fp32["optimizer"], quantized["optimizer"]) == (twin, optimizer)
    # torch's AdamW counts steps in a float32.
    assert fp32["state_bytes"] - 4 * MOMENTS_OF_TWIN[twin] * NUMEL in (0, 4)
    # Codes of a byte, scales per block of 256.
    least = MOMENTS[optimizer] * NUMEL
    assert least < quantized["state_bytes"] < 1.05 * least
    for row in result["rows"]:
        assert row["host_bytes"] == 8 * NUMEL + row["state_bytes"]
        assert row["step_ms"] > 0


def test_at_scale_default_is_a_partition_that_no_cache_holds():
    assert 16 * at_scale.NUMEL == 2**29
