# SPDX-License-Identifier: Apache-2.0
"""Traffic and step times, from known hardware; what is measured of a machine."""

from dataclasses import replace

import pytest
from places import ROOT

from zero8.bench.step.machines import Machine
from zero8.plan import check, measure
from zero8.plan.model import Model
from zero8.plan.rates import RECORDED, Rates
from zero8.plan.setup import Setup
from zero8.plan.share import share_of
from zero8.plan.step_time import Hardware, step_times
from zero8.plan.traffic import traffic_of

MODEL = Model("", (("a", (4096, 4096)), ("b", (4096, 4096))))
RATES = Rates(2.0, 1.0, 1.5, "here")


def hardware(cores=64, gb_per_s=100.0):
    return Hardware(Machine("host", cores, gb_per_s), RATES, nvme_gb_per_s=5.0, gpu_gb_per_s=1e3)


@pytest.mark.parametrize(
    ("settings", "grad_bytes"),
    [
        ({}, 2),
        ({"stage": 3}, 2),
        ({"dtype": "fp32"}, 4),
        ({"engine": "fsdp2"}, 4),
        ({"offload": "none"}, 4),
        ({"stage": 3, "offload": "nvme"}, 4),
    ],
    ids=str,
)
def test_traffic_of_a_step_is_28_bytes_and_that_of_codes_and_gradients(settings, grad_bytes):
    each = traffic_of(MODEL, Setup(**settings))
    fp32, zero8 = (one.step_bytes / MODEL.numel for one in each)
    assert fp32 == 28
    assert zero8 == 8 + grad_bytes + 2 * (2 + 12 / 256)


@pytest.mark.parametrize(
    ("settings", "fp32", "zero8"),
    [
        ({}, 4 + 2, 2 + 2),
        ({"dtype": "bf16-masters"}, 2 + 2, 2 + 2),
        ({"stage": 3}, 2 + 2 + 4 + 2, 2 + 2 + 2 + 2),
        ({"stage": 3, "accumulation_steps": 8}, 32 + 4 + 2, 32 + 2 + 2),
        ({"stage": 2, "accumulation_steps": 8}, 30 + 4 + 2, 30 + 2 + 2),
        ({"stage": 1, "accumulation_steps": 8}, 4 + 2, 2 + 2),
        ({"stage": 3, "offload": "nvme"}, 2 + 2 + 4 + 2, 2 + 2 + 4 + 2),
        ({"engine": "fsdp2"}, 4 + 4, 4 + 4),
        ({"offload": "none"}, 0, 0),
    ],
    ids=str,
)
def test_traffic_of_the_link_is_gradients_down_and_weights_up(settings, fp32, zero8):
    """In stage 3 a gradient goes down to its partition, up again, and down to the step.

    With micro-batches the sum so far goes up, and down again, for each of them.
    """
    each = traffic_of(MODEL, Setup(**settings))
    assert [one.link_bytes / MODEL.numel for one in each] == [fp32, zero8]


def test_traffic_of_a_step_without_masters_is_22_bytes_and_10_and_the_scales():
    setup = Setup(dtype="bf16-masters")
    fp32, zero8 = (one.step_bytes / MODEL.numel for one in traffic_of(MODEL, setup))
    assert (fp32, zero8) == (22, 6 + 2 * (2 + 12 / 256))
    corrected = Setup(dtype="24-bit-masters")
    assert traffic_of(MODEL, corrected)[1].step_bytes / MODEL.numel == zero8 + 2


@pytest.mark.parametrize(
    ("settings", "fp32", "zero8"),
    [
        ({}, 8 + 6 + 2, 2 + 2),
        ({"dtype": "bf16-masters"}, 4 + 4 + 2, 2),
        ({"dtype": "24-bit-masters"}, 4 + 4 + 2, 2),
        ({"stage": 3}, 8 + 6 + 2, 6 + 2),
        ({"stage": 3, "dtype": "bf16-masters"}, 4 + 2, 2),
        ({"stage": 3, "offload_params": True}, 8 + 6, 2),
        ({"stage": 3, "offload_params": True, "dtype": "bf16-masters"}, 4 + 4, 0),
        ({"stage": 3, "offload_params": True, "offload": "nvme"}, 8 + 6, 8 + 6),
        ({"engine": "fsdp2"}, 4 + 8 + 4, 4 + 4),
        ({"offload": "none"}, 0, 0),
    ],
    ids=str,
)
def test_traffic_around_the_step_is_what_passes_and_their_absence_leave(settings, fp32, zero8):
    each = traffic_of(MODEL, Setup(**settings))
    assert [one.passes_bytes / MODEL.numel for one in each] == [fp32, zero8]


# Less than float32 and bfloat16 weights with scales of the same dtype, for each element.
SAVED = {4: 4 - (1 + 4 / 4096), 2: 2 - (1 + 2 / 4096)}


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize(("dtype", "saved"), [("bf16", SAVED[4]), ("bf16-masters", SAVED[2])])
def test_traffic_of_int8_weights_is_less_by_what_they_save(offload, dtype, saved):
    """The step reads and writes them, a pass around it reads them, and the link takes them once.

    For the forward and the backward they are gathered with scales in bfloat16.
    """
    setup = Setup(engine="fsdp2", offload=offload, dtype=dtype, world_size=4)
    numel, on_the_way = MODEL.numel, saved * (offload == "cpu")
    int8 = replace(setup, weights="int8")
    for one, less in zip(traffic_of(MODEL, setup), traffic_of(MODEL, int8), strict=True):
        assert one.step_bytes - less.step_bytes == 2 * saved * numel / 4
        assert one.passes_bytes - less.passes_bytes == on_the_way * numel / 4
        assert one.link_bytes - less.link_bytes == on_the_way * numel / 4
        assert one.network_bytes - less.network_bytes == 2 * SAVED[2] * numel * 3 / 4


def test_traffic_over_the_network_is_the_same_for_both_and_none_for_one_rank():
    for setup, times in (
        (Setup(stage=2, world_size=4), 2),
        (Setup(stage=2, world_size=4, accumulation_steps=3), 4),
        (Setup(stage=3, world_size=4, accumulation_steps=3), 9),
        (Setup(stage=3), 0),
    ):
        fp32, zero8 = traffic_of(MODEL, setup)
        expected = times * 2 * MODEL.numel * 3 // 4
        assert fp32.network_bytes == zero8.network_bytes == expected


def test_traffic_of_nvme_reads_and_writes_masters_gradients_and_moments():
    fp32, zero8 = traffic_of(MODEL, Setup(stage=3, offload="nvme"))
    assert fp32.nvme_read_bytes == fp32.nvme_write_bytes == 16 * MODEL.numel
    assert zero8.nvme_read_bytes == (8 + 2 + 12 / 256) * MODEL.numel


def test_step_time_with_few_cores_is_theirs():
    fp32, zero8 = step_times(MODEL, Setup(), hardware(cores=2))
    assert (fp32.limit, zero8.limit) == ("cores", "cores")
    assert fp32.seconds == pytest.approx(MODEL.numel * 2.0 / 2 / 1e9)
    assert zero8.seconds == pytest.approx(MODEL.numel * 1.0 / 2 / 1e9)
    assert fp32.saturating_cores == pytest.approx(100 * 2.0 / 28)


def test_step_time_with_many_cores_is_that_of_the_memory_for_all_ranks_of_a_host():
    fp32, zero8 = step_times(MODEL, Setup(world_size=16, ranks_per_host=4), hardware())
    assert (fp32.limit, zero8.limit) == ("memory", "memory")
    assert fp32.seconds == pytest.approx(4 * 28 * MODEL.numel / 16 / 100e9)
    assert zero8.seconds < fp32.seconds


def test_phase_adds_the_passes_of_all_ranks_of_a_host_at_the_memorys_speed():
    setup = Setup(world_size=16, ranks_per_host=4)
    for traffic, time in zip(
        traffic_of(MODEL, setup), step_times(MODEL, setup, hardware()), strict=True
    ):
        passes = 4 * traffic.passes_bytes / 100e9
        assert time.phase_seconds == pytest.approx(time.seconds + passes) and passes > 0
    on_gpu, _ = step_times(MODEL, Setup(offload="none"), hardware())
    assert on_gpu.phase_seconds == on_gpu.seconds


def test_step_time_without_masters_uses_the_rate_of_bf16():
    _, zero8 = step_times(MODEL, Setup(dtype="bf16-masters"), hardware(cores=1))
    assert zero8.seconds == pytest.approx(MODEL.numel * 1.5 / 1e9)


def test_step_time_on_nvme_adds_the_transfers_or_hides_behind_them():
    setup = Setup(stage=3, offload="nvme")
    (alone, _), (hidden, _) = (
        step_times(MODEL, Setup(stage=3, offload="nvme", pipelined=p), hardware(cores=2))
        for p in (False, True)
    )
    transfers = 2 * traffic_of(MODEL, setup)[0].nvme_read_bytes / 5e9
    assert alone.limit == hidden.limit == "NVMe"
    assert alone.seconds == pytest.approx(transfers + MODEL.numel * 1e-9)
    assert hidden.seconds == pytest.approx(transfers)


def test_step_time_on_the_gpu_is_that_of_its_memory():
    fp32, _ = step_times(MODEL, Setup(offload="none"), hardware())
    assert fp32.seconds == pytest.approx(28 * MODEL.numel / 1e12)
    assert (fp32.limit, fp32.saturating_cores) == ("GPU memory", None)


def test_measure_follows_from_the_times():
    calibration = measure.Calibration(2 * 4096, 3)
    assert len(calibration.timed) == 3 + 3  # 1, 2 and 3 threads
    machine, rates, bandwidths = calibration.result([8192.0 * n for n in (3, 2, 1, 4, 2, 1)])
    assert bandwidths == {1: 7.0, 2: 14.0, 3: 28.0}
    assert (machine.cores, machine.gb_per_s) == (3, 28.0)
    assert (rates.fp32_adam, rates.zero8, rates.zero8_bf16) == (3.0, 2.0, 1.0)


def test_measure_of_this_machine_gives_positive_numbers(monkeypatch):
    monkeypatch.setattr(measure, "NUMEL", 2 * 4096)
    machine, rates, _ = measure.measure()
    assert machine.gb_per_s > 0 and min(rates.fp32_adam, rates.zero8, rates.zero8_bf16) > 0


def test_bench_plan_has_a_row_for_each_step_size_and_number_of_threads():
    result = check.measure(2 * 4096, rounds=2)
    counts = {int(count) for count in result["gb_per_s"]}
    names = {("deepspeed", "fp32"), ("torch", "fp32"), ("zero8", "fp32"), ("zero8", "bf16")}
    assert {(row["name"], row["variant"]) for row in result["rows"]} == names
    assert len(result["rows"]) == len(names) * len(check.SIZES) * len(counts)
    for row in result["rows"]:
        ratio = row["estimated_ms"] / row["measured_ms"]
        assert row["error_percent"] == pytest.approx(100 * (ratio - 1))


def test_rates_that_are_recorded_are_those_of_the_record():
    record = (ROOT / RECORDED.source).read_text()
    for rate in (RECORDED.fp32_adam, RECORDED.zero8, RECORDED.zero8_bf16):
        assert f"{rate:.3f}" in record


def test_share_of_more_ranks_than_elements_is_not_empty():
    tiny = Model("", (("a", (3,)),))
    assert share_of(tiny, Setup(stage=3, world_size=8)).numel == 1
