# SPDX-License-Identifier: Apache-2.0
"""What the tests of the kernels share."""

import kernel_steps
import pytest


@pytest.fixture
def steppers(host_kernel):
    """The step of each instruction set, and of the CUDA kernel compiled for the host, by name."""
    return kernel_steps.on_every_isa() | {"cuda": host_kernel.step}
