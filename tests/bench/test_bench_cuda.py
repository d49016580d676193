# SPDX-License-Identifier: Apache-2.0
"""What the step measurement does differently on a GPU, for which the CPU stands."""

import json
import sys
from dataclasses import replace
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

from zero8 import cli
from zero8.bench import gpu
from zero8.bench.step import command as step
from zero8.bench.step import devices, timing
from zero8.bench.step import kernel as step_kernel
from zero8.bench.step.algorithms import HYPER, ZERO8
from zero8.bench.step.contenders import flat_params, peer_contenders
from zero8.bench.step.devices import CPU, DEVICES, GPU, half_copier
from zero8.bench.step.targets import checks
from zero8.bench.step.timing import time_by_the_wall
from zero8.bench.step.variants import BF16_CORRECTED, CUDA_VARIANTS, VARIANTS
from zero8.op import kernel
from zero8.spec.codec import CODECS

NUMEL = 2**16
MACHINE = {
    "gpu": "NVIDIA Made Up",
    "gpus": 1,
    "memory_bytes": 80 * 2**30,
    "multiprocessors": 132,
    "compute_capability": "9.0",
    "driver": "580.1",
    "cuda": "13.0",
}
ON_CPU = replace(GPU, place=CPU.place, variants=CUDA_VARIANTS)


def bench(out, *words):
    common = ["bench", "step", "--device", "cuda", "--json", out]
    return cli.main([str(word) for word in (*common, *words)])


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    """The result of a small run whose tensors are on the CPU, and the path of its files."""

    def time_call(call, samples):
        time_by_the_wall(call, samples)
        samples.host_ns.append(5000)

    def check(*_):
        step_kernel.check_on(CPU.place, kernel.step, ["adam"], ["log"], [step_kernel.CHECK_SHAPE])

    out = tmp_path_factory.mktemp("bench") / "step.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "absence", lambda: None)
        patch.setattr(gpu, "machine", lambda: MACHINE)
        patch.setattr(step, "ROUNDS", 2)
        patch.setitem(DEVICES, "cuda", replace(ON_CPU, time_call=time_call, check=check))
        words = ["--algorithm", "adam", "--numel", NUMEL, "--against", "torch"]
        assert bench(out, *words) == 0
    return json.loads(out.read_text()), out


def test_gpu_run_has_a_row_for_every_step_and_a_copy_of_its_bytes(result):
    rows = {(row["name"], row["variant"], row["codec"]): row for row in result[0]["rows"]}
    ours = {("zero8", v.name, codec) for v in CUDA_VARIANTS for codec in CODECS}
    others = {("torch", "fp32", None), ("torch", "bf16", None)}
    sizes = {"fp32": 16, "bf16": 10, "bf16_corrected": 12, "fp32_states": 28, "bf16_states": 14}
    sizes |= {"fp32_bf16_grad": 14, "fp32_fp16_grad": 14}
    sizes |= {
        f"{v.name}_{bits}_bits": sizes[v.name] - 4 * (1 - bits / 8)
        for v in CUDA_VARIANTS
        for bits in (4, 6)
    }
    half = "fp32_fp16_grad"
    same = (half, f"{half}_6_bits", f"{half}_4_bits")  # as with gradients of bfloat16
    copies = {("copy", variant, None) for variant in sizes if variant not in same}
    assert rows.keys() == ours | others | copies
    for row in rows.values():
        assert row["bytes_per_param"] == sizes[row["ceiling"]]
        assert (row["host_us"], row["extra_bytes"]) == (5.0, None)
        assert row["isa"] == ("cuda" if row["codec"] else None)


def test_gpu_run_tabulates_and_draws_the_gpu_and_leaves_out_the_cpu(result):
    found, out = result
    assert found["machine"]["gpu"] == MACHINE
    assert found["in_cache"] == found["on_machines"] == found["checks"] == []
    assert "--device cuda" in found["command"] and "--threads" not in found["command"]
    table = out.with_suffix(".md").read_text()
    assert "# Optimizer steps on a GPU, 65,536 parameters, NVIDIA Made Up" in table
    assert "driver 580.1, CUDA 13.0" in table and "| zero8 adam fp32_bf16_grad `log` |" in table
    assert "## In the cache" not in table
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], f"--device cuda: looked for a CUDA device with torch {torch.__version__}"),
        (["--threads", "2"], "--threads: got --device cuda, expected --device cpu"),
        (["--isa", "avx2"], "--isa: got --device cuda, expected --device cpu"),
        (["--against", "deepspeed"], "--against: got 'deepspeed', expected one of ['torch'"),
    ],
)
def test_gpu_run_that_is_not_possible_is_a_usage_error(
    tmp_path, words, message, monkeypatch, capsys
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if words:
        monkeypatch.setattr(gpu, "absence", lambda: None)
    with pytest.raises(SystemExit) as caught:
        bench(tmp_path / "x.json", *words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_gpu_time_begins_when_the_host_has_asked_for_everything(monkeypatch):
    cuda, samples = Mock(), timing.Samples()
    cuda.Event.side_effect = [cuda.began, cuda.ended]
    cuda.began.elapsed_time.return_value = 0.25
    monkeypatch.setattr(timing, "torch", Mock(cuda=cuda))
    timing.time_on_gpu(cuda.work, samples)
    assert samples.times == [250_000]
    cuda.began.elapsed_time.assert_called_once_with(cuda.ended)
    cuda._sleep.assert_called_once_with(timing.CYCLES_PER_NS * samples.host_ns[0])
    called = [name for name, *_ in cuda.mock_calls if name != "Event"]
    first = ["synchronize", "work", "synchronize", "_sleep"]
    timed = ["began.record", "work", "ended.record", "ended.synchronize", "began.elapsed_time"]
    assert called == first + timed


def test_gpu_variants_of_a_torch_without_grad_dtype_have_gradients_as_their_parameters(monkeypatch):
    assert devices.gpu_variants() == CUDA_VARIANTS
    monkeypatch.setattr(devices, "Tensor", object)
    assert devices.gpu_variants() == VARIANTS


def test_gpu_check_steps_on_every_algorithm_codec_and_variant():
    seen = []

    def record_step(segments):
        (one,) = segments
        kind = one.algorithm.name, one.codec.name, one.param.dtype, one.grad.dtype
        seen.append((*kind, one.correction is None))
        kernel.step(segments)

    step_kernel.check_on(CPU.place, record_step, ZERO8, CODECS, [(2, 300)])
    wanted = {
        (algorithm, codec, v.dtype, v.grad_dtype, not v.correction_bits)
        for algorithm in ZERO8
        for codec in CODECS
        for v in CUDA_VARIANTS
    }
    assert set(seen) == wanted and len(seen) == 3 * len(wanted)


@pytest.mark.parametrize("name", ["param", "correction", "grad"])
def test_gpu_check_of_other_bits_raises(name):
    def wrong(segments):
        for segment in segments:
            tensor = getattr(segment, name)
            if tensor is not None:
                tensor.view(torch.uint8)[-1] ^= 64
        kernel.step(segments)

    with pytest.raises(
        RuntimeError, match="of adam, codec log, .*, on cpu: bits differ from the CPU"
    ):
        step_kernel.check_on(CPU.place, wrong, ["adam"], ["log"], [(2, 300)])


def test_moved_segment_shares_nothing():
    segment = step_kernel.sample("adam", "log", BF16_CORRECTED, (2, 300))
    before = [t.clone() for t in step_kernel._results(segment).values()]
    kernel.step([step_kernel.prepared(step_kernel.moved(segment, CPU.place), 1)])
    assert all(map(torch.equal, step_kernel._results(segment).values(), before))


def test_gpu_copy_moves_half_of_the_bytes_each_way():
    p = flat_params(NUMEL, ON_CPU).parameter(CUDA_VARIANTS[3])
    copy = half_copier(p, p.grad, [torch.zeros(NUMEL, dtype=torch.uint8)] * 2)
    (source,), target = copy.args, copy.func.__self__
    copy()
    assert source.nbytes == 7 * NUMEL and torch.equal(source, target)
    assert source.data_ptr() != target.data_ptr()


def flash_module(log):
    """A package of FlashOptim's shape: states that are no tensors."""

    class State:
        def __init__(self, p):
            self.quantized = torch.zeros(p.shape, dtype=torch.int8)
            self.scales = torch.zeros(p.numel() // 32, dtype=torch.float16)

    class FlashAdamW(torch.optim.Optimizer):
        def __init__(self, params, *, master_weight_bits, lr, betas, eps, weight_decay):
            super().__init__(params, {})
            log.append(master_weight_bits)
            self.bits = master_weight_bits

        def step(self):
            for p in self.param_groups[0]["params"]:
                self.state[p] = {"exp_avg": State(p), "exp_avg_sq": State(p)}
                if self.bits:
                    self.state[p]["error_bits"] = torch.zeros(p.shape, dtype=torch.int8)

    module = ModuleType("flashoptim")
    module.FlashAdamW = FlashAdamW
    return module


def test_flashoptim_has_its_master_bits_and_bytes(monkeypatch):
    log = []
    monkeypatch.setitem(sys.modules, "flashoptim", flash_module(log))
    found, skipped = peer_contenders(["flashoptim"], flat_params(NUMEL, ON_CPU))
    counts = {one.variant: one.bytes_per_param for one in found}
    assert counts == {"fp32": 16, "bf16_corrected": 12} and skipped == []
    assert log == [None, 24]


@pytest.mark.parametrize(
    ("name", "variants"), [("bitsandbytes", ["fp32", "bf16"]), ("torchao", ["fp32"])]
)
def test_8bit_peer_has_the_settings_of_all_and_steps_on_its_variants(monkeypatch, name, variants):
    class AdamW8bit(torch.optim.AdamW):
        def __init__(self, params, block_size=256, **hyper):
            assert (block_size, hyper) == (256, HYPER["adam"])
            super().__init__(params, **hyper)

    package = ModuleType(f"{name}.optim")
    package.AdamW8bit = AdamW8bit
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    found, skipped = peer_contenders([name], flat_params(NUMEL, ON_CPU))
    assert ([one.variant for one in found], skipped) == (variants, [])


# --- Targets -------------------------------------------------------------------------------------


def made_up_result(numel=2**26, ns=0.004, fraction=0.9, variants=CUDA_VARIANTS):
    ours = [("zero8", v.name, "log", "cuda", ns) for v in variants]
    peers = [("bitsandbytes", name, None, None, 0.006) for name in ("fp32", "bf16")]
    peers.append(("torch", "fp32", None, None, 0.007))
    rows = [
        dict(zip(("name", "variant", "codec", "isa", "ns_per_param"), row, strict=True))
        | {"algorithm": "adam", "fraction_of_stream": fraction, "ratio_vs_deepspeed_fp32": None}
        for row in ours + peers
    ]
    return {"numel": numel, "machine": {"gpu": MACHINE}, "default": "log", "rows": rows}


@pytest.mark.parametrize(
    ("changes", "count", "missed"),
    [
        ({}, 9, []),
        ({"numel": 2**24, "ns": 1.0}, 0, []),
        ({"fraction": 0.8}, 9, ["fraction of its own stream"] * 5),
        ({"ns": 0.00445}, 9, ["speed over bitsandbytes's"] * 2),
        ({"variants": CUDA_VARIANTS[:4]}, 8, ["pairs of dtypes measured"]),
    ],
)
def test_gpu_checks_hold_the_default_codec_against_its_rows(changes, count, missed):
    found = checks(made_up_result(**changes))
    assert len(found) == count
    unmet = [check["target"] for check in found if not check["met"]]
    assert len(unmet) == len(missed)
    assert all(part in target for part, target in zip(missed, unmet, strict=True))
