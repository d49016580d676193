# SPDX-License-Identifier: Apache-2.0
"""Whoever resumes from a checkpoint on NVMe of zero8 0.1.0 gets the bits that 0.1.0 would have got.

For other checkpoints see test_format2.py.
"""

import pytest
from format2_files import EXPECTED, differences, unpacked
from format2_runs import NVME_RUNS, go_on
from needs import need_nvme
from ranks import run_ranks

# DeepSpeed's aio is built by a first run, which takes minutes.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]


@pytest.mark.parametrize("name", NVME_RUNS)
def test_zero3_nvme_run_of_format_2_resumed_goes_on_with_the_same_bits(tmp_path, name):
    need_nvme()
    run = NVME_RUNS[name]
    path = unpacked(run.saved, tmp_path)
    # The names of swapped files count what the process has made before.
    got = run_ranks(go_on, run.world_size, tmp_path, name=name, path=path)
    assert differences(got, EXPECTED[name]) == []
