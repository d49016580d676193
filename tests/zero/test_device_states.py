# SPDX-License-Identifier: Apache-2.0
"""States on a GPU, pretended: the bits of the CPU, devices do not mix, and moments stay there."""

import pytest
from processes import outcomes_of

from zero8.spec.codec import CODECS

CHECKS = (
    "quantize_and_dequantize",
    "zeros",
    "read_and_write",
    "write_of_values_on_the_cpu",
    "clone_and_to",
    "moment_of_a_piece",
    "moment_tensor",
    "record_stream",
    "adopted",
    "saved_state",
    "bitsandbytes_and_back",
)


@pytest.fixture(scope="module")
def outcomes(forks):
    """The pretended GPU is for a whole process, so this one must not have it."""
    return outcomes_of(forks, "device_worker.py")


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("check", CHECKS)
def test_state_on_a_gpu_has_the_bits_of_the_cpu_and_stays_there(outcomes, check, codec):
    error = outcomes[f"{check} {codec}"]
    assert error is None, error


def test_worker_has_these_checks_and_no_others(outcomes):
    assert set(outcomes) == {f"{check} {codec}" for check in CHECKS for codec in CODECS}
