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
    planned = sum(found["planned_bytes"].values())
    # Weights, gradients and moments; what else the process holds counts, too.
    assert 6 * 2**25 < planned < found["planned_fp32_adam_bytes"]
    assert found["peak_bytes"] > 6 * 2**25
    assert len(set(found["losses"])) == 3 and found["losses"][2] < found["losses"][0]


def test_host_memory_table_has_the_plan_the_peak_and_the_losses():
    table = host_memory.markdown(
        {
            "numel": 10**9,
            "planned_bytes": {"host, weights": 2**31, "host, master weights": 0},
            "planned_fp32_adam_bytes": 2**33,
            "peak_bytes": 2**31 + 2**29,
            "losses": [1.5, 1.25],
            "step_ms": [1000.0, 20.4],
            "command": "python -m benchmarks.host_memory",
            "commit": None,
            "cpu": "a processor",
            "machine": {"cores": 2},
            "memory_bytes": 24 * 2**30,
        }
    )
    for line in ("| host, weights | 2.00 |", "| **planned** | **2.00** |", "**2.50** |", "1.2500"):
        assert line in table
    assert "master weights | 0" not in table and "1,000, 20 ms" in table
