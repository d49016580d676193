# SPDX-License-Identifier: Apache-2.0
"""What torch's allocator adds to page-locked memory, by hand."""

import json

import pytest

from zero8 import cli
from zero8.environment.host_memory import max_round_mib, rounding_bytes
from zero8.plan.memory import ROUNDING, rows_of
from zero8.plan.model import Model
from zero8.plan.setup import Setup, with_ds_config

MIB, GIB = 2**20, 2**30


@pytest.mark.parametrize(
    ("sizes", "threshold", "added"),
    [
        ([], None, 0),
        ([0, 1, 2, 3, 4, 5], None, 1 + 3),
        ([4096, 4097], None, 4095),
        ([33 * GIB] * 2, None, 2 * 31 * GIB),
        ([3 * MIB, 5 * MIB], 4, MIB),
        ([3 * MIB, 5 * MIB], 5, MIB + 3 * MIB),  # up to the threshold, itself included
        ([3 * MIB, 5 * MIB], 0, 0),
    ],
)
def test_rounding_is_up_to_powers_of_two_at_most_the_threshold(sizes, threshold, added):
    assert rounding_bytes(sizes, threshold) == added


@pytest.mark.parametrize(
    ("environment", "threshold"),
    [
        ({}, None),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, None),
        ({"PYTORCH_ALLOC_CONF": "a:b,pinned_max_round_threshold_mb:64"}, 64),
        ({"PYTORCH_CUDA_ALLOC_CONF": "pinned_max_round_threshold_mb:8,a:b"}, 8),
    ],
)
def test_threshold_is_that_of_the_environment(environment, threshold):
    assert max_round_mib(environment) == threshold


def added(setup):
    """Return GiB that are added with an fp32 Adam and with zero8 to 9.24 billion parameters."""
    rows = [row for row in rows_of(Model.of_size("9.24B"), setup) if row.what == ROUNDING]
    return [(round(row.fp32_bytes / GIB, 1), round(row.zero8_bytes / GIB, 1)) for row in rows]


@pytest.mark.parametrize(
    ("setup", "gib"),
    [
        # Masters and gradients 34.4 GiB in 64, copies of weights 17.2 in 32; zero8 allocates its
        # 16-bit gradients exactly.
        (Setup(), [(29.6 * 2 + 14.8, 29.6 + 14.8)]),
        (Setup(max_round_mib=64), []),
        (Setup(page_locks=False), []),
        (Setup(offload="none"), []),
        # One partition of gradients; master weights are not page-locked.  Of the gradients of the
        # step nine sub-groups have 3.74 GiB in 4, and the last 0.73 in 1.
        (Setup(stage=3), [(14.8 + 9 * 0.26 + 0.27, 14.8)]),
        (Setup(engine="fsdp2"), [(0, 0)]),  # matrices of 4096 x 4096, each by itself
        (with_ds_config(Setup(), {"zero_optimization": {"stage": 2}}), []),
    ],
    ids=["zero2", "threshold", "not locked", "on the GPU", "zero3", "fsdp2", "config"],
)
def test_plan_adds_the_rounding_of_each_tensor(setup, gib):
    assert added(setup) == [pytest.approx(each, abs=0.15) for each in gib]


def test_plan_names_the_remedy_and_takes_it_from_the_environment(capsys, monkeypatch):
    words = ["plan", "--parameters", "9.24B"]
    assert cli.main(words) == 0
    printed = capsys.readouterr().out
    (remedy,) = {word for word in printed.split() if word.startswith("PYTORCH_ALLOC_CONF=")}
    monkeypatch.setenv(*remedy.split("="))
    assert cli.main([*words, "--json"]) == 0
    assert ROUNDING in printed
    assert ROUNDING not in [row["what"] for row in json.loads(capsys.readouterr().out)["memory"]]
