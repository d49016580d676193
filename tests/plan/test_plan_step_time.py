# SPDX-License-Identifier: Apache-2.0
"""Traffic and times of the step, from known hardware, in bytes per parameter."""

import pytest

from zero8.plan.model import Model
from zero8.plan.setup import Setup
from zero8.plan.step_time import Hardware, step_of

MODEL = Model("", (("a", (4096, 4096)), ("b", (4096, 4096))))
STATES = 2 + 12 / 256  # codes, and three float32 scales per block


def steps(cores=64, **settings):
    hardware = Hardware(cores=cores, gb_per_s=100.0, core_ns=(2.0, 1.0), nvme_gb_per_s=5.0)
    return [step_of(MODEL, one, hardware) for one in Setup(**settings).twins]


def per_param(name, **settings):
    return [getattr(one, name) / MODEL.numel for one in steps(**settings)]


INT8 = {"engine": "fsdp2", "weights": "int8"}
ROW = 1 + 4 / 4096  # an INT8 weight, and its part of a float32 scale


@pytest.mark.parametrize(
    ("settings", "fp32", "zero8"),
    [
        ({}, 3 * 4 + 16, 2 * 4 + 2 + 2 * STATES),
        ({"offload": "none"}, 3 * 4 + 16, 3 * 4 + 2 * STATES),
        ({"dtype": "bf16-masters"}, 3 * 2 + 16, 3 * 2 + 2 * STATES),
        ({"dtype": "24-bit-masters"}, 3 * 2 + 16, 3 * 2 + 2 * (STATES + 1)),
        (INT8, 2 * ROW + 4 + 16, 2 * ROW + 4 + 2 * STATES),
    ],
    ids=str,
)
def test_step_reads_gradients_and_reads_and_writes_weights_and_moments(settings, fp32, zero8):
    assert per_param("memory_bytes", **settings) == pytest.approx([fp32, zero8])


@pytest.mark.parametrize(
    ("settings", "fp32", "zero8"),
    [
        ({}, 4 + 2, 2 + 2),
        ({"dtype": "bf16-masters"}, 2 + 2, 2 + 2),
        ({"stage": 3}, 2 + 2 + 4 + 2, 2 + 2 + 2 + 2),
        ({"stage": 3, "accumulation_steps": 8}, 32 + 4 + 2, 32 + 2 + 2),
        ({"stage": 2, "accumulation_steps": 8}, 30 + 4 + 2, 30 + 2 + 2),
        ({"stage": 1, "accumulation_steps": 8}, 4 + 2, 2 + 2),
        ({"stage": 3, "offload": "nvme"}, 2 + 2 + 4 + 2, 2 + 2 + 2 + 2),
        ({"engine": "fsdp2"}, 4 + 4, 4 + 4),
        (INT8, 4 + ROW, 4 + ROW),
        ({"offload": "none"}, 0, 0),
    ],
    ids=str,
)
def test_link_takes_gradients_down_and_weights_up(settings, fp32, zero8):
    """In stage 3 a gradient goes down to its partition, up again, and down to the step.

    With micro-batches the sum so far goes up, and down again, for each of them.
    """
    assert per_param("link_bytes", **settings) == [fp32, zero8]


def test_step_time_with_few_cores_is_theirs():
    fp32, zero8 = steps(cores=2)
    assert (fp32.limit, zero8.limit) == ("cores", "cores")
    assert fp32.seconds == pytest.approx(MODEL.numel * 2.0 / 2 / 1e9)
    assert zero8.seconds == pytest.approx(MODEL.numel * 1.0 / 2 / 1e9)


def test_step_time_with_many_cores_is_that_of_the_memory_for_all_ranks_of_a_host():
    fp32, zero8 = steps(world_size=16, ranks_per_host=4)
    assert (fp32.limit, zero8.limit) == ("memory", "memory")
    assert fp32.seconds == pytest.approx(4 * 28 * MODEL.numel / 16 / 100e9)
    assert zero8.seconds < fp32.seconds
