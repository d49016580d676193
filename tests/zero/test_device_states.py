# SPDX-License-Identifier: Apache-2.0
"""States on a GPU, pretended: the bits of the CPU, devices do not mix, and moments stay there.

With `offload_states` of ZeRO 1 and 2 they stay 8-bit, and leave the GPU for good.
"""

import pytest
from processes import outcomes_of

WORKERS = ("device_worker.py", "offload_worker.py")


@pytest.mark.parametrize("worker", WORKERS)
def test_state_on_a_gpu_has_the_bits_of_the_cpu_and_stays_there_or_leaves(forks, worker):
    """The pretended GPU is for a whole process, so this one must not have it."""
    outcomes = outcomes_of(forks, worker, DS_ACCELERATOR="cpu")
    assert len(outcomes) >= 10
    assert {name: error for name, error in outcomes.items() if error} == {}
