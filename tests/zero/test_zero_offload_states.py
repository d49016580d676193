# SPDX-License-Identifier: Apache-2.0
"""`offload_states` of ZeRO 1 and 2: 8-bit moments stay 8-bit, and leave the GPU for good."""

import pytest
from processes import outcomes_of

from zero8.spec.codec import CODECS


@pytest.fixture(scope="module")
def outcomes(forks):
    return outcomes_of(forks, "offload_worker.py", DS_ACCELERATOR="cpu")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "check",
    [
        "offload_and_reload",
        "memory_on_the_gpu_is_free_before_its_cache_is_emptied",
        "states_of_others",
    ],
)
def test_offload_states_on_a_gpu_keeps_moments_8bit_and_frees_the_gpu(outcomes, check, codec):
    error = outcomes[f"{check} {codec}"]
    assert error is None, error
