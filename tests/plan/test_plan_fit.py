# SPDX-License-Identifier: Apache-2.0
"""The verdict of `zero8 plan`: fits or not, and what makes it fit, by bytes counted by hand."""

import pytest

from zero8.plan.memory import Memory, cases_of, needs
from zero8.plan.model import Model
from zero8.plan.setup import Setup

GIB = 2**30
MODEL = Model.of_size("8B")
NUMEL = 8_000_000_000 // 4096 * 4096
LARGEST = 4096 * 4096
# Codes of both moments, and for each block of 256 a scale of m and two of v.
MOMENTS = NUMEL * 2 + NUMEL // 256 * 12
# Master weights, 16-bit weights on their way, and the largest gradient.
OTHERS = NUMEL * (4 + 2) + 2 * LARGEST


def test_need_of_a_host_is_that_of_all_its_ranks():
    _, zero8 = needs(MODEL, Setup(world_size=16, ranks_per_host=8))
    expected = (OTHERS + 2 * NUMEL + MOMENTS) / 2 + 7 * 2 * LARGEST
    assert zero8.host_bytes == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("place", ["host_bytes", "gpu_bytes"])
def test_limit_that_is_the_need_fits_and_a_byte_less_does_not(place, missing):
    _, zero8 = needs(MODEL, Setup())
    limits = {"host_bytes": None, "gpu_bytes": None, place: getattr(zero8, place) - missing}
    assert zero8.fits(Memory(**limits)) is (missing == 0)


def cases(setup, host_gib, gpu_gib=None):
    """Return the needs by the option in their descriptions, or by all of these."""
    there = Memory(host_gib * GIB, gpu_gib and gpu_gib * GIB)
    found = cases_of(MODEL, setup, there)
    return {what.rpartition("(")[2].rstrip(")"): need for what, need in found}


def test_cases_of_what_does_not_fit_are_changes_with_their_needs():
    found = cases(Setup(), 64, 24)
    nvme = 2 * NUMEL + 4 * 4 * 10**9 + MOMENTS * 10**9 // NUMEL  # 16-bit gradients, and buffers
    host_bytes = {
        "--dtype 24-bit-masters": NUMEL * (2 + 1 + 2) + 2 * LARGEST + MOMENTS,
        "--dtype bf16-masters": NUMEL * (2 + 2) + 2 * LARGEST + MOMENTS,
        "--stage 3": NUMEL * (4 + 2) + MOMENTS,  # which keeps gradients once
        "--stage 3 --offload nvme": nvme,
        "--engine fsdp2": NUMEL * (4 + 4) + MOMENTS,
        'stage 3 with "offload_param" in --ds-config': NUMEL * (2 + 4 + 2) + MOMENTS,
    }
    assert {what: found[what].host_bytes for what in host_bytes} == host_bytes
    assert list(found)[2:] == [*host_bytes, "--world-size 16"]
    assert found["--world-size 16"] == needs(MODEL, Setup(world_size=16))[1]


@pytest.mark.parametrize(
    ("setup", "options"),
    [
        (Setup(engine="fsdp2"), ["--dtype 24-bit-masters", "--dtype bf16-masters"]),
        (Setup(engine="fsdp2", dtype="bf16-masters"), []),
        (Setup(stage=0, offload="none"), ["--offload cpu --stage 2"]),
        (Setup(stage=3, offload="none"), ["--offload cpu --stage 3"]),
    ],
)
def test_cases_are_changes_of_settings_that_can_be(setup, options):
    found = list(cases(setup, 0.001, 0.001))
    assert found[2 : 2 + len(options)] == options
    assert not any("--world-size" in what for what in found)  # no number is enough
