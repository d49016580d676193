# SPDX-License-Identifier: Apache-2.0
"""States on a GPU, pretended: the bits of the CPU, devices do not mix, and moments stay there.

With `offload_states` of ZeRO 1 and 2 they stay 8-bit, and leave the GPU for good.
"""

from processes import outcomes_of


def test_state_on_a_gpu_has_the_bits_of_the_cpu_and_stays_there_or_leaves(forks):
    """The pretended GPU is for a whole process, so this one must not have it."""
    outcomes = outcomes_of(forks, "device_worker.py", DS_ACCELERATOR="cpu")
    assert len(outcomes) == 12
    assert {name: error for name, error in outcomes.items() if error} == {}
