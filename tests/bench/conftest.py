# SPDX-License-Identifier: Apache-2.0
import functools

import cpuinfo
import pytest


@pytest.fixture(scope="session", autouse=True)
def one_look_at_the_processor():
    """DeepSpeed's optimizers and all records ask for its name, each time for a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpuinfo, "get_cpu_info", functools.cache(cpuinfo.get_cpu_info))
        yield
