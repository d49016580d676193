# SPDX-License-Identifier: Apache-2.0
"""What the tests of the CUDA kernels share."""

import pytest


@pytest.fixture
def host(host_kernel):
    """The kernels, compiled for the host."""
    return host_kernel
