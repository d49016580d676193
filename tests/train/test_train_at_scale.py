# SPDX-License-Identifier: Apache-2.0
import json

import pytest
from ranks import build_ops

from examples.gpt import at_scale
from examples.gpt.engine import CONFIGS

NUMEL = 2**16


@pytest.fixture(scope="module", autouse=True)
def ops():
    build_ops()


@pytest.mark.parametrize("engine", CONFIGS)
def test_at_scale_counts_the_memory_of_both_optimizers_and_times_them(engine):
    result = at_scale.measure(engine, numel=NUMEL, rounds=2)
    assert json.loads(json.dumps(result)) == result
    assert (result["numel"], result["rounds"]) == (NUMEL, 2)
    fp32, quantized = result["rows"]
    assert (fp32["optimizer"], quantized["optimizer"]) == ("AdamW", "Adam8bitBlockwise")
    # torch's counts steps in a float32.
    assert fp32["state_bytes"] - 8 * NUMEL in (0, 4)
    # Two codes of a byte, scales per block of 256.
    assert 2 * NUMEL < quantized["state_bytes"] < 2.1 * NUMEL
    for row in result["rows"]:
        assert row["host_bytes"] == 8 * NUMEL + row["state_bytes"]
        assert row["step_ms"] > 0


def test_at_scale_default_is_a_partition_that_no_cache_holds():
    assert 16 * at_scale.NUMEL == 2**29
