# SPDX-License-Identifier: Apache-2.0
"""The measurement of steps on a GPU, run on the CPU by a clock that any call can be timed with."""

import json
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from zero8 import cli
from zero8.bench import gpu
from zero8.bench.step import cuda as step_cuda
from zero8.bench.step import cuda_clock as step_cuda_clock
from zero8.bench.step import cuda_contenders as step_cuda_contenders
from zero8.bench.step import cuda_targets as step_cuda_targets
from zero8.bench.step import kernel as step_kernel
from zero8.bench.step.cuda_contenders import Skipped, Weights, list_timeables, timeables
from zero8.bench.step.kernel import HYPER
from zero8.bench.step.variants import BF16_CORRECTED, CUDA_VARIANTS, FP32, VARIANTS
from zero8.op import kernel
from zero8.spec.codec import CODECS

NUMEL = 2**16
CPU = torch.device("cpu")
MACHINE = {
    "gpu": "NVIDIA Made Up",
    "gpus": 1,
    "memory_bytes": 80 * 2**30,
    "multiprocessors": 132,
    "compute_capability": "9.0",
    "driver": "580.1",
    "cuda": "13.0",
}
BYTES = {"fp32": 16, "bf16": 10, "bf16_corrected": 12, "fp32_bf16_grad": 14, "fp32_fp16_grad": 14}


class WallClock:
    """The interface of `CudaClock`."""

    def host_ns(self, call):
        call()
        return 5000

    def device_ns(self, call, host_ns):
        assert host_ns == 5000
        began = time.perf_counter_ns()
        call()
        return float(time.perf_counter_ns() - began)


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    """The CPU in the place of the GPU, its kernel in that of the GPU's, and two rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "absence", lambda: None)
        patch.setattr(gpu, "machine", lambda: MACHINE)
        patch.setattr(step_cuda, "DEVICE", "cpu")
        patch.setattr(step_cuda, "CudaClock", WallClock)
        patch.setattr(step_cuda.cuda, "step", kernel.step)
        patch.setattr(step_cuda, "ROUNDS", 2)
        patch.setattr(step_kernel, "CUDA_CHECK_SHAPE", (2, 300))
        yield


def test_bench_cuda_clock_keeps_the_gpu_waiting_until_the_host_has_asked(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait for the event")

        def elapsed_time(self, other):
            return 0.25 if other is not self else 0.0

    functions = {
        "Event": Event,
        "synchronize": lambda: log.append("wait"),
        "_sleep": lambda cycles: log.append(cycles),
    }
    cuda = SimpleNamespace(**functions)
    monkeypatch.setattr(step_cuda_clock, "torch", SimpleNamespace(cuda=cuda))
    clock = step_cuda_clock.CudaClock()
    assert clock.device_ns(lambda: log.append("call"), 1000) == 250_000
    assert log == ["wait", 4000, "record", "call", "record", "wait for the event"]
    log.clear()
    assert clock.host_ns(lambda: time.sleep(1e-3)) >= 1e6
    assert log == ["wait"] * (step_cuda_clock.HOST_CALLS + 1)


def bench(out, *words):
    common = ["bench", "step", "--device", "cuda", "--json", out]
    return cli.main([str(word) for word in (*common, *words)])


# --- The whole -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The paths of one small run through the command line, of every codec."""
    out = tmp_path_factory.mktemp("bench") / "step.json"
    assert bench(out, "--numel", NUMEL, "--against", "torch,torchao") == 0
    return out


@pytest.mark.slow
def test_bench_cuda_run_has_a_row_for_every_step_and_a_copy_of_its_bytes(tiny):
    result = json.loads(tiny.read_text())
    rows = {(row["name"], row["variant"], row["codec"]): row for row in result["rows"]}
    assert len(rows) == len(result["rows"])
    ours = {("zero8", v.name, codec): BYTES[v.name] for v in CUDA_VARIANTS for codec in CODECS}
    others = {("torch", "fp32", None): 28, ("torch", "bf16", None): 14}
    copies = {("copy", f"{count} bytes", None): count for count in (10, 12, 14, 16, 28)}
    assert {key: row["bytes_per_param"] for key, row in rows.items()} == ours | others | copies
    for row in rows.values():
        copy = rows["copy", f"{row['bytes_per_param']} bytes", None]
        assert row["fraction_of_copy"] == pytest.approx(copy["ns_per_param"] / row["ns_per_param"])
        assert row["gb_per_s"] == pytest.approx(row["bytes_per_param"] / row["ns_per_param"])
        assert row["ns_per_param_p10"] <= row["ns_per_param"] <= row["ns_per_param_p90"]
        assert (row["numel"], row["host_us"]) == (NUMEL, 5.0)


@pytest.mark.slow
def test_bench_cuda_run_says_where_and_by_what_it_was_made(tiny):
    result = json.loads(tiny.read_text())
    assert result["machine"] == MACHINE
    assert result["sizes"] == [NUMEL] and result["repeats"] == 2 and result["errors"] == []
    assert "--device cuda" in result["command"] and f"--numel {NUMEL}" in result["command"]
    assert {"versions", "commit", "cpu", "seconds", "default", "device"} <= result.keys()


@pytest.mark.slow
def test_bench_cuda_run_times_a_list_of_tensors(tiny):
    rows = json.loads(tiny.read_text())["tensor_list"]
    assert [(row["name"], row["codec"]) for row in rows] == [("zero8", "log"), ("torch", None)]
    assert {row["tensors"] for row in rows} == {400} and {row["numel"] for row in rows} == {NUMEL}
    assert all(row["ratio"] > 0 for row in rows)


@pytest.mark.slow
def test_bench_cuda_run_draws_and_tabulates(tiny):
    assert tiny.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    table = tiny.with_suffix(".md").read_text()
    assert "# Optimizer steps on NVIDIA Made Up" in table and "driver 580.1, CUDA 13.0" in table
    assert "## 2^16 parameters" in table and "| zero8 fp32_bf16_grad `log` |" in table
    assert "## 400 tensors of a model, 2^16 parameters together" in table


@pytest.mark.slow
def test_bench_cuda_run_lists_what_is_skipped_with_the_reason(tiny):
    skipped = {e["name"]: e["reason"] for e in json.loads(tiny.read_text())["skipped"]}
    assert skipped.keys() == {"torchao fp32 (2^16)", "torchao (400 tensors)"}
    assert "torchao" in skipped["torchao fp32 (2^16)"]  # not installed, or not on a CPU
    assert "- torchao (400 tensors): it is compiled" in tiny.with_suffix(".md").read_text()


def test_bench_cuda_sizes_are_powers_of_4_up_to_2_to_the_30():
    assert [size.bit_length() - 1 for size in step_cuda.SIZES] == [20, 22, 24, 26, 28, 30]
    assert all(size.bit_count() == 1 for size in step_cuda.SIZES)


# --- What cannot be measured ---------------------------------------------------------------------


def test_bench_cuda_without_a_gpu_is_a_usage_error_that_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "absence", ABSENCE)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as caught:
        bench(tmp_path / "x.json")
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert f"--device cuda: looked for a CUDA device with torch {torch.__version__}" in message
    assert "nvidia-smi: " in message and not list(tmp_path.iterdir())


ABSENCE = gpu.absence


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--numel", "70000"], "--numel: got 70000, expected a multiple of 4096, at least 65536"),
        (["--threads", "2"], "--threads: got it with --device cuda, expected --device cpu"),
        (["--isa", "avx2"], "--isa: got it with --device cuda, expected --device cpu"),
        (["--codec", "gzip"], "--codec: got 'gzip', expected one of"),
        (["--against", "deepspeed"], "--against: got 'deepspeed', expected one of ['torch'"),
    ],
)
def test_bench_cuda_bad_argument_says_what_is_expected(tmp_path, words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        bench(tmp_path / "x.json", *words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["param", "correction", "grad"])
def test_bench_cuda_other_bits_stop_the_run_before_it_times(tmp_path, monkeypatch, name):
    def wrong(segments):
        for segment in segments:
            tensor = getattr(segment, name)
            if tensor is not None:
                tensor.view(torch.uint8)[-1] ^= 64
        kernel.step(segments)

    monkeypatch.setattr(step_cuda.cuda, "step", wrong)
    monkeypatch.setattr(step_cuda, "interleaved", lambda *_: pytest.fail("has timed"))
    with pytest.raises(RuntimeError, match="of codec .*, on cpu: got other bits than the CPU"):
        bench(tmp_path / "x.json", "--numel", NUMEL)
    assert not list(tmp_path.iterdir())


def test_bench_cuda_bits_are_checked_of_every_codec_and_variant_on_the_device():
    seen = []

    def step(segments):
        (one,) = segments
        seen.append((one.codec.name, one.param.dtype, one.grad.dtype, one.correction is None))
        kernel.step(segments)

    step_kernel.check_on(CPU, step, CODECS, [(2, 300)])
    wanted = {
        (codec, v.dtype, v.grad_dtype, not v.correction_bits)
        for codec in CODECS
        for v in CUDA_VARIANTS
    }
    assert set(seen) == wanted and len(seen) == 3 * len(wanted)


def test_bench_cuda_moved_segment_shares_nothing():
    segment = step_kernel.sample("log", BF16_CORRECTED, (2, 300))
    before = [t.clone() for t in step_kernel._results(segment).values()]
    kernel.step([step_kernel.prepared(step_kernel.moved(segment, CPU), 1)])
    assert all(map(torch.equal, step_kernel._results(segment).values(), before))


# --- The contenders ------------------------------------------------------------------------------


def test_bench_cuda_contenders_step_on_gradients_of_their_dtype():
    weights = Weights(NUMEL, CPU)
    for variant in CUDA_VARIANTS:
        p = weights.parameter(variant)
        assert (p.dtype, p.grad.dtype) == (variant.dtype, variant.grad_dtype)
        assert p.shape == p.grad.shape and p.numel() == NUMEL
        assert p.data_ptr() == weights.parameter(variant).data_ptr()


def test_bench_cuda_without_grad_dtype_in_torch_says_so(monkeypatch):
    monkeypatch.setattr(step_cuda_contenders, "Tensor", object)
    skipped = Skipped()
    found = timeables(["log"], [], NUMEL, CPU, skipped)
    assert {one.variant for one in found if one.name == "zero8"} == {v.name for v in VARIANTS}
    assert [entry["name"] for entry in skipped.entries] == [
        f"zero8 {v.name} log (2^16)" for v in CUDA_VARIANTS[3:]
    ]
    assert all("has no Tensor.grad_dtype" in entry["reason"] for entry in skipped.entries)


def test_bench_cuda_copy_moves_half_of_the_bytes_each_way():
    buffer = step_cuda_contenders._copy_buffer(NUMEL, CPU)
    before = buffer.clone()
    step_cuda_contenders._copy(buffer, NUMEL, 10).call()
    moved = 5 * NUMEL
    assert torch.equal(buffer[1, :moved], before[0, :moved])
    assert torch.equal(buffer[1, moved:], before[1, moved:])
    assert torch.equal(buffer[0], before[0])


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


def test_bench_cuda_flashoptim_has_its_master_bits_and_bytes(monkeypatch):
    log = []
    monkeypatch.setitem(sys.modules, "flashoptim", flash_module(log))
    found = timeables([], ["flashoptim"], NUMEL, CPU, Skipped())
    counts = {one.variant: one.bytes_per_param for one in found if one.name == "flashoptim"}
    assert counts == {"fp32": 16, "bf16_corrected": 12}
    assert log == [None, 24]


@pytest.mark.parametrize(
    ("name", "packages", "variants"),
    [
        ("bitsandbytes", ["bitsandbytes", "bitsandbytes.optim"], ["fp32", "bf16"]),
        ("torchao", ["torchao", "torchao.optim"], ["fp32"]),
    ],
)
def test_bench_cuda_8bit_peers_step_on_these_variants(monkeypatch, name, packages, variants):
    class AdamW8bit(torch.optim.AdamW):
        def __init__(self, params, block_size=256, **hyper):
            assert hyper == HYPER
            super().__init__(params, **hyper)

    for package in packages:
        module = ModuleType(package)
        module.AdamW8bit = AdamW8bit
        monkeypatch.setitem(sys.modules, package, module)
    found = timeables([], [name], NUMEL, CPU, Skipped())
    assert [one.variant for one in found if one.name == name] == variants


def failing(error):
    def make(variant, params):
        raise error

    return make


def test_bench_cuda_peer_that_fails_is_skipped_with_its_reason(monkeypatch):
    peer = step_cuda_contenders.Peer(failing(OSError("no such thing\nas this")), (FP32,))
    monkeypatch.setitem(step_cuda_contenders.PEERS, "torchao", peer)
    skipped = Skipped()
    timeables([], ["torchao"], NUMEL, CPU, skipped)
    timeables([], ["torchao"], 2 * NUMEL, CPU, skipped)
    entry = {"name": "torchao fp32 (2^16, 2^17)", "reason": "OSError: no such thing"}
    assert skipped.entries == [entry]


def test_bench_cuda_zero8_without_memory_is_skipped_and_with_an_error_is_not(monkeypatch):
    no_memory = torch.OutOfMemoryError("CUDA out of memory")
    monkeypatch.setattr(
        step_cuda_contenders, "_zero8", lambda codec, *rest: failing(no_memory)(*rest)
    )
    skipped = Skipped()
    assert timeables(["log"], [], NUMEL, CPU, skipped) == []
    assert list_timeables("log", [], NUMEL, CPU, skipped) == []
    assert len(skipped.entries) == len(CUDA_VARIANTS) + 1
    error = RuntimeError("cuLaunchKernel failed")
    monkeypatch.setattr(step_cuda_contenders, "_zero8", lambda codec, *rest: failing(error)(*rest))
    for call in (
        lambda: timeables(["log"], [], NUMEL, CPU, Skipped()),
        lambda: list_timeables("log", [], NUMEL, CPU, Skipped()),
    ):
        with pytest.raises(RuntimeError, match="cuLaunchKernel failed"):
            call()


@pytest.mark.slow
def test_bench_cuda_size_that_fails_leaves_the_others_and_a_failed_run(
    tmp_path, monkeypatch, capsys
):
    real = step_cuda._rows
    reasons = {
        2**17: torch.OutOfMemoryError("CUDA out of memory"),
        2**18: RuntimeError("bad\naddress"),
    }

    def rows(plan, numel, *rest):
        if numel in reasons:
            raise reasons[numel]
        return real(plan, numel, *rest)

    monkeypatch.setattr(step_cuda, "_rows", rows)
    monkeypatch.setattr(step_cuda, "SIZES", (2**16, 2**17, 2**18))
    monkeypatch.setattr(step_cuda, "LIST_NUMEL", 2**16)
    out = tmp_path / "step.json"
    assert bench(out, "--codec", "log", "--against", "torch") == 1
    result = json.loads(out.read_text())
    assert {row["numel"] for row in result["rows"]} == {2**16}
    assert result["errors"] == ["2^18: bad"]
    assert [e["name"] for e in result["skipped"]] == ["all (2^17)"]
    assert "FAILED 2^18: bad" in capsys.readouterr().out
    assert "**FAILED 2^18: bad**" in out.with_suffix(".md").read_text()


# --- Targets -------------------------------------------------------------------------------------


def made_up_row(name, variant, codec, numel, ns, fraction=0.9):
    return {
        "name": name,
        "variant": variant,
        "codec": codec,
        "numel": numel,
        "ns_per_param": ns,
        "fraction_of_copy": fraction,
    }


def made_up_rows(numel, ns=0.004, fraction=0.9):
    rows = [made_up_row("zero8", v.name, "log", numel, ns, fraction) for v in CUDA_VARIANTS]
    rows += [made_up_row("zero8", v.name, "dynamic", numel, 1.0, 0.1) for v in CUDA_VARIANTS]
    rows += [made_up_row("bitsandbytes", name, None, numel, 0.006) for name in ("fp32", "bf16")]
    return [*rows, made_up_row("torch", "fp32", None, numel, 0.007)]


def unmet(rows):
    checks = step_cuda_targets.checks({"rows": rows, "default": "log"})
    return [check["target"] for check in checks if not check["met"]]


def test_bench_cuda_checks_hold_the_default_codec_at_its_worst_large_size():
    large = made_up_rows(2**26) + made_up_rows(2**28)
    checks = step_cuda_targets.checks({"rows": large, "default": "log"})
    assert len(checks) == 1 + len(CUDA_VARIANTS) + 3 and unmet(large) == []
    assert unmet(large + made_up_rows(2**24, ns=1.0, fraction=0.1)) == []
    assert len(unmet(large + made_up_rows(2**30, fraction=0.8))) == len(CUDA_VARIANTS)
    assert [target.split(", ")[1] for target in unmet(large + made_up_rows(2**30, ns=0.00445))] == [
        "speed over bitsandbytes's",
        "speed over bitsandbytes's",
    ]
    assert len(unmet(large + made_up_rows(2**30, ns=0.005))) == 3


def test_bench_cuda_checks_miss_a_pair_of_dtypes_that_is_not_there():
    rows = [row for row in made_up_rows(2**26) if row["variant"] != "fp32_bf16_grad"]
    assert unmet(rows) == ["pairs of dtypes measured, at least"]


def test_bench_cuda_checks_of_small_sizes_are_none():
    assert step_cuda_targets.checks({"rows": made_up_rows(2**24), "default": "log"}) == []
