# SPDX-License-Identifier: Apache-2.0
"""States on a GPU, pretended: the bits of the CPU, devices do not mix, and moments stay there.

With `offload_states` of ZeRO 1 and 2 they stay 8-bit, and leave the GPU for good.
"""

import pytest
from ranks import run_ranks


def check(name, codec):
    """Run a function of a module that pretends a GPU for its whole process."""
    import device_worker

    getattr(device_worker, name)(codec)


@pytest.mark.parametrize("codec", ["log", "log6", "dynamic"])
@pytest.mark.parametrize("name", ["read_and_write", "adopted", "saved_state", "offload_and_reload"])
def test_state_on_a_gpu_has_the_bits_of_the_cpu_and_stays_there_or_leaves(name, codec, tmp_path):
    run_ranks(check, 1, tmp_path, name=name, codec=codec)
