# SPDX-License-Identifier: Apache-2.0
"""The verdict of `zero8 plan`: fits or not, and what makes it fit, by bytes counted by hand."""

import json

import pytest

from zero8 import cli
from zero8.plan.fit import Limits, needs, verdict
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
GPU = 2 * NUMEL + 2 * 500_000_000 + 2 * LARGEST


def test_need_is_the_sum_of_what_a_host_and_a_gpu_keep():
    fp32_adam, zero8 = needs(MODEL, Setup())
    assert (fp32_adam.host_bytes, fp32_adam.gpu_bytes) == (OTHERS + (4 + 8) * NUMEL, GPU)
    assert (zero8.host_bytes, zero8.gpu_bytes) == (OTHERS + 2 * NUMEL + MOMENTS, GPU)


def test_need_of_a_host_is_that_of_all_its_ranks():
    _, zero8 = needs(MODEL, Setup(world_size=16, ranks_per_host=8))
    expected = (OTHERS + 2 * NUMEL + MOMENTS) / 2 + 7 * 2 * LARGEST
    assert zero8.host_bytes == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("place", ["host_bytes", "gpu_bytes"])
def test_limit_that_is_the_need_fits_and_a_byte_less_does_not(place, missing):
    _, zero8 = needs(MODEL, Setup())
    limits = {"host_bytes": None, "gpu_bytes": None, place: getattr(zero8, place) - missing}
    assert zero8.fits(Limits(**limits)) is (missing == 0)


def test_verdict_of_what_fits_names_no_change():
    found = verdict(MODEL, Setup(), Limits(128 * GIB, 24 * GIB))
    assert not found.fp32_adam.fits(found.limits) and found.zero8.fits(found.limits)
    assert found.changes == ()


def test_verdict_names_single_changes_with_what_they_need():
    found = verdict(MODEL, Setup(), Limits(64 * GIB, 24 * GIB))
    _, masters, stage3, nvme, ranks = found.changes
    assert "--dtype bf16-masters" in masters.what
    assert masters.need.host_bytes == NUMEL * (2 + 2) + 2 * LARGEST + MOMENTS
    assert stage3.what == "ZeRO stage 3 (--stage 3)"  # which keeps gradients once
    assert stage3.need.host_bytes == NUMEL * (4 + 2) + MOMENTS
    assert "--stage 3 --offload nvme" in nvme.what
    # 16-bit gradients; 4 buffers of a sub-group of 10^9 float32 weights; its states.
    assert nvme.need.host_bytes == 2 * NUMEL + 4 * 4 * 10**9 + MOMENTS * 10**9 // NUMEL
    assert "--world-size 16" in ranks.what and "2 hosts" in ranks.what


def test_verdict_names_24_bit_masters_where_they_fit_with_a_byte_more_than_bf16_ones():
    found = verdict(MODEL, Setup(), Limits(64 * GIB, 24 * GIB))
    corrected, masters, *_ = found.changes
    assert corrected.what == "24-bit master weights (--dtype 24-bit-masters)"
    assert corrected.need.host_bytes == NUMEL * (2 + 1 + 2) + 2 * LARGEST + MOMENTS
    assert corrected.need.host_bytes - masters.need.host_bytes == NUMEL
    assert corrected.need.gpu_bytes == masters.need.gpu_bytes == GPU


def test_verdict_under_fsdp2_names_masters_of_less_than_32_bits():
    found = verdict(MODEL, Setup(engine="fsdp2"), Limits(64 * GIB, None))
    corrected, masters, _ = found.changes
    assert "--dtype 24-bit-masters" in corrected.what and "--dtype bf16-masters" in masters.what
    assert corrected.need.host_bytes == NUMEL * (2 + 1 + 2) + MOMENTS
    assert masters.need.host_bytes == NUMEL * (2 + 2) + MOMENTS


@pytest.mark.parametrize("dtype", ["fp32", "bf16-masters", "24-bit-masters"])
def test_verdict_of_a_run_without_fp32_masters_beside_its_weights_names_no_smaller_ones(dtype):
    changes = verdict(MODEL, Setup(dtype=dtype), Limits(32 * GIB, None)).changes
    assert changes and not any("master weights" in change.what for change in changes)


def test_verdict_names_the_smallest_number_of_ranks_that_fits():
    limits = Limits(64 * GIB, None)
    (ranks,) = (c for c in verdict(MODEL, Setup(), limits).changes if "ranks" in c.what)
    fits = {n: needs(MODEL, Setup(world_size=n))[1].fits(limits) for n in (2, 4, 8, 16)}
    assert fits == {2: False, 4: False, 8: False, 16: True}
    assert ranks.what.startswith("16 ranks") and ranks.need == needs(MODEL, Setup(world_size=16))[1]


def test_verdict_names_pairs_where_no_single_change_fits():
    limits = Limits(24 * GIB, 8 * GIB)
    found = verdict(MODEL, Setup(), limits)
    assert found.changes
    for change in found.changes:
        assert " and " in change.what and change.need.fits(limits)


def test_verdict_of_stage_0_names_offload():
    found = verdict(MODEL, Setup(stage=0, offload="none"), Limits(None, 24 * GIB))
    assert "states in host memory (--offload cpu --stage 2)" in found.changes[0].what
    assert found.changes[0].need.gpu_bytes == GPU


def test_verdict_where_nothing_helps_names_nothing():
    assert verdict(MODEL, Setup(), Limits(1000, 1000)).changes == ()


def plan(capsys, *words):
    status = cli.main(["plan", "--parameters", "8B", *words])
    return status, capsys.readouterr().out


def test_plan_with_limits_prints_the_verdict_below_the_table(capsys):
    status, printed = plan(capsys, "--host-memory", "64", "--gpu-memory", "24")
    headers, _, *rows = printed.split("\n\n")[-1].splitlines()
    assert status == 0
    assert headers.split() == "each host, GiB, of 64 each GPU, GiB, of 24 fits plan".split()
    assert [row.split()[:4] for row in rows[:2]] == [
        ["134.14", "15.86", "NO", "fp32"],
        ["74.89", "15.86", "NO", "zero8"],
    ]
    assert rows[3].split()[:3] == ["45.08", "15.86", "yes"]
    assert rows[3].endswith("(--dtype bf16-masters)")
    assert max(map(len, printed.splitlines())) <= 120


def test_plan_with_pairs_of_changes_breaks_their_lines_between_words(capsys):
    _, printed = plan(capsys, "--host-memory", "24", "--gpu-memory", "8")
    assert "--stage 3 --offload nvme" in printed and " and " in printed
    assert max(map(len, printed.splitlines())) <= 120


def test_plan_without_limits_prints_no_verdict(capsys):
    assert "fits" not in plan(capsys)[1]


def test_plan_where_nothing_helps_says_so(capsys):
    assert "None of the changes tried" in plan(capsys, "--host-memory", "0.001")[1]


def test_plan_in_json_has_limits_verdict_and_changes(capsys):
    result = json.loads(plan(capsys, "--json", "--host-memory", "64")[1])
    assert result["limits"] == {"host_bytes": 64 * GIB, "gpu_bytes": None}
    assert result["fits"] == {"fp32_adam": False, "zero8": False}
    assert result["changes_that_fit"][0]["need"]["host_bytes"] < 64 * GIB


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_plan_of_a_memory_that_cannot_be_is_refused(capsys, value):
    status, printed = plan(capsys, "--host-memory", value)
    assert status == 2 and "--host-memory: got" in printed


@pytest.mark.parametrize("words", [(), ("--stage", "3", "--offload", "nvme", "--world-size", "16")])
def test_plan_gives_all_amounts_of_bytes_in_gib(capsys, words):
    words += ("--nvme-bandwidth", "5") if words else ()
    table = plan(capsys, *words)[1].split("\n\n")[1]
    assert "GB" not in table
    numel = NUMEL // 16 if words else NUMEL
    (memory,) = [line for line in table.splitlines() if line.startswith("step, memory")]
    scale = 8 if words else 1
    moved = scale * (3 * 4 * numel + 2 * 8 * numel) / GIB
    assert float(memory.split()[-2].replace(",", "")) == pytest.approx(moved, rel=1e-3)
