# SPDX-License-Identifier: Apache-2.0
"""The comparison of a run's memory with its plan."""

import json

import pytest
from places import ROOT

from benchmarks import host_memory

CONFIG = "configs/zero3_bf16_masters_offload.json"


def measured():
    config = json.loads((ROOT / CONFIG).read_text())
    config["zero_optimization"]["reduce_bucket_size"] = 2**20
    return host_memory.measure(config, 2**25, 3, width=1024)


@pytest.mark.slow
def test_host_memory_of_a_run_is_measured_beside_its_plan(standing_ranks):
    (found,) = standing_ranks(1).run(measured, timeout_s=300)
    assert found["numel"] == 2**25
    # Weights, gradients and moments; what else the process holds counts, too.
    assert 6 * 2**25 < sum(found["planned_bytes"].values())
    assert found["peak_bytes"] > 6 * 2**25
    assert len(set(found["losses"])) == 3 and found["losses"][2] < found["losses"][0]
    table = host_memory.markdown(found)
    assert f"| **planned** | {sum(found['planned_bytes'].values()) / 2**30:.2f} |" in table
