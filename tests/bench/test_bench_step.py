# SPDX-License-Identifier: Apache-2.0
"""The step measurement: what it times is right and whole, whatever the times are."""

import ctypes
import json
import math
import os
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import replace
from itertools import product
from types import ModuleType, SimpleNamespace

import pytest
import torch
from deepspeed.ops.lion import cpu_lion

from zero8 import cli
from zero8.algorithms.table import ELEMENTWISE
from zero8.bench.step import command as step
from zero8.bench.step import contenders as step_contenders
from zero8.bench.step import kernel as step_kernel
from zero8.bench.step import machines
from zero8.bench.step import targets as step_targets
from zero8.bench.step.algorithms import HYPER, ZERO8, scalars_at
from zero8.bench.step.contenders import flat_params, peer_contenders, zero8_contenders
from zero8.bench.step.devices import CPU, GPU
from zero8.bench.step.report import busy_lines
from zero8.bench.step.tensors import flat_shape, model_shapes
from zero8.bench.step.timing import Timed, interleaved, peak_extra_bytes, spread
from zero8.bench.step.variants import BF16, BF16_CORRECTED, FP32, VARIANTS
from zero8.op import kernel
from zero8.spec import reference
from zero8.spec.codec import CODECS, DEFAULT_CODEC

NUMEL = 2**16
ROW_KEYS = {
    "algorithm",
    "name",
    "variant",
    "codec",
    "isa",
    "threads",
    "numel",
    "repeats",
    "waited_share",
    "bytes_per_param",
    "ns_per_param",
    "ns_per_param_min",
    "ns_per_param_p10",
    "ns_per_param_p90",
    "gb_per_s",
    "ceiling",
    "fraction_of_stream",
    "ratio_vs_deepspeed_fp32",
    "extra_bytes",
}
RESULT_KEYS = {
    "default",
    "algorithms",
    "numel",
    "threads",
    "repeats",
    "rows",
    "in_cache",
    "tensor_list",
    "on_machines",
    "skipped",
    "checks",
    "versions",
    "commit",
    "cpu",
    "machine",
    "command",
    "seconds",
}


# Bytes that a step of each algorithm moves per parameter, by its copy.
STREAMS = {
    "adam": {"fp32": 16, "bf16": 10, "bf16_corrected": 12, "fp32_states": 28, "bf16_states": 14},
    "lion": {"fp32": 14, "bf16": 8, "bf16_corrected": 10, "fp32_states": 20, "bf16_states": 10},
    "sgd": {"fp32": 14, "bf16": 8, "bf16_corrected": 10, "fp32_states": 20},
    "ademamix": {"fp32": 18, "bf16": 12, "bf16_corrected": 14},
}
PEER_ROWS = {
    "adam": [("deepspeed", "fp32"), ("deepspeed", "bf16"), ("torch", "fp32")],
    "lion": [("deepspeed", "fp32"), ("deepspeed", "bf16")],
    "sgd": [("torch", "fp32")],
    "ademamix": [],
}


def parsed(out, *words):
    parser = ArgumentParser()
    step.add_arguments(parser)
    return parser.parse_args(["--json", str(out), "--numel", str(NUMEL), *words])


@pytest.fixture
def few_rounds(monkeypatch):
    monkeypatch.setattr(step, "ROUNDS", 2)
    monkeypatch.setattr(step_kernel, "CACHED_REPEATS", 2)


# --- The whole -----------------------------------------------------------------------------------


# DeepSpeed's Lion takes a minute to compile.
WITH_LION = pytest.param(list(STREAMS), marks=pytest.mark.slow, id="all")


@pytest.fixture(scope="module", params=[["adam", "sgd", "ademamix"], WITH_LION], ids=",".join)
def algorithms(request):
    return request.param


@pytest.fixture(scope="module")
def tiny(algorithms, tmp_path_factory):
    """The path of one small run through the command line, of every codec."""
    out = tmp_path_factory.mktemp("bench") / "new" / "step.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "ROUNDS", 2)
        patch.setattr(step_kernel, "CACHED_REPEATS", 2)
        words = ["--json", out, "--numel", NUMEL, "--threads", 2, "--against", "deepspeed,torch"]
        words += [] if algorithms == list(STREAMS) else ["--algorithm", ",".join(algorithms)]
        assert cli.main(["bench", "step", *map(str, words)]) == 0
    return out


def test_run_writes_the_promised_keys(tiny):
    result = json.loads(tiny.read_text())
    assert result.keys() == RESULT_KEYS
    assert result["skipped"] == []
    for row in result["rows"]:
        assert row.keys() == ROW_KEYS
        assert row["gb_per_s"] == pytest.approx(row["bytes_per_param"] / row["ns_per_param"])
        assert row["ns_per_param_p10"] <= row["ns_per_param"] <= row["ns_per_param_p90"]
    assert "--threads 2" in result["command"]


def test_run_has_a_row_for_every_step_and_a_copy_of_its_streams(tiny, algorithms):
    rows = json.loads(tiny.read_text())["rows"]
    assert list(dict.fromkeys(row["algorithm"] for row in rows)) == algorithms
    for algorithm in algorithms:
        streams = STREAMS[algorithm]
        of_one = [row for row in rows if row["algorithm"] == algorithm]
        kinds = {(row["name"], row["variant"], row["codec"]): row for row in of_one}
        assert len(kinds) == len(of_one)
        ours = {("zero8", v.name, codec) for v in VARIANTS for codec in CODECS}
        others = {(*peer, None) for peer in PEER_ROWS[algorithm]}
        copies = {("copy", variant, None) for variant in streams}
        copies |= {("copy", f"{v.name}_{bits}_bits", None) for v in VARIANTS for bits in (4, 6)}
        assert kinds.keys() == ours | others | copies
        deepspeed = kinds.get(("deepspeed", "fp32", None))
        # Of each moment's codes a quarter or a half less is read, and written.
        moments = len(ZERO8[algorithm].algorithm.moments)
        sizes = streams | {
            f"{v.name}_{bits}_bits": streams[v.name] - moments * 2 * (1 - bits / 8)
            for v in VARIANTS
            for bits in (4, 6)
        }
        for (name, variant, codec), row in kinds.items():
            narrow = {"log6": "_6_bits", "linear4": "_4_bits"}
            suffix = narrow.get(codec, "") if name in ("zero8", "copy") else "_states"
            assert row["ceiling"] == variant + suffix
            ceiling = kinds["copy", row["ceiling"], None]
            assert row["bytes_per_param"] == ceiling["bytes_per_param"] == sizes[row["ceiling"]]
            ratio = ceiling["ns_per_param"] / row["ns_per_param"]
            assert row["fraction_of_stream"] == pytest.approx(ratio)
            speed = row["ratio_vs_deepspeed_fp32"]
            ns = deepspeed and pytest.approx(deepspeed["ns_per_param"])
            assert (speed and speed * row["ns_per_param"]) == ns


def test_run_times_every_instruction_set_in_the_cache(tiny, algorithms):
    rows = json.loads(tiny.read_text())["in_cache"]
    cases = {(row["algorithm"], row["codec"], row["variant"], row["isa"]) for row in rows}
    variants = [v.name for v in VARIANTS]
    assert cases == set(product(algorithms, CODECS, variants, kernel.isas()))


def test_run_says_of_each_step_what_limits_it_elsewhere(tiny, algorithms):
    result = json.loads(tiny.read_text())
    found = result["on_machines"]
    steps = {(row["algorithm"], row["variant"], row["codec"]) for row in found}
    assert steps == set(product(algorithms, (v.name for v in VARIANTS), CODECS))
    copied = max(row["gb_per_s"] for row in result["rows"] if row["name"] == "copy")
    assert f"| this one: 2 cores, {copied:.0f} GB/s |" in tiny.with_suffix(".md").read_text()


def test_machines_are_limited_by_their_cores_or_by_their_memory():
    step = {"algorithm": "lion", "variant": "fp32", "codec": "log", "isa": "avx2"}
    other = {**step, "algorithm": "sgd"}
    result = {
        "threads": 2,
        "rows": [
            {"name": "zero8", **step, "bytes_per_param": 16, "gb_per_s": 20.0},
            {"name": "zero8", **step, "codec": "dynamic", "bytes_per_param": 16, "gb_per_s": 9.0},
            {"name": "copy", "gb_per_s": 32.0},
            {"name": "copy", "gb_per_s": 30.0},
        ],
        "in_cache": [{**step, "ns_per_param": ns} for step, ns in ((step, 1.6), (other, 9.9))],
    }
    (row,) = machines.rows(result)
    assert (row["algorithm"], row["codec"], row["ns_in_cache"]) == ("lion", "log", 1.6)
    bounds = [(on["machine"], on["ns_per_param"], on["saturating_cores"]) for on in row["on"]]
    assert bounds == [
        ("this one", 0.8, pytest.approx(3.2)),
        ("desktop", pytest.approx(0.2), pytest.approx(8)),
        ("server", 0.08, pytest.approx(20)),
    ]


def test_run_draws_and_tabulates_every_row(tiny, algorithms):
    assert tiny.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    table = tiny.with_suffix(".md").read_text()
    assert f"| zero8 adam fp32 `{DEFAULT_CODEC}` |" in table
    assert "| copy sgd fp32_states |" in table
    for algorithm in {"adam", "lion"} & set(algorithms):
        assert f"| deepspeed {algorithm} bf16 |" in table
    assert "400 tensors, 65,536 elements together, adam fp32" in table


@pytest.mark.slow
def test_run_missing_peer_is_listed_with_its_reason(tmp_path, monkeypatch, few_rounds, capsys):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    out = tmp_path / "step.json"
    words = ["--algorithm", "lion,adam", "--codec", "log", "--against", "bitsandbytes"]
    assert step.run(parsed(out, *words)) == 0
    result = json.loads(out.read_text())
    (entry,) = result["skipped"]  # once for both algorithms
    assert entry["name"] == "bitsandbytes" and "ModuleNotFoundError" in entry["reason"]
    assert "skipped bitsandbytes: ModuleNotFoundError" in capsys.readouterr().out
    assert "- bitsandbytes: ModuleNotFoundError" in out.with_suffix(".md").read_text()
    assert {row["name"] for row in result["rows"]} == {"zero8", "copy"}
    assert {row["ratio_vs_deepspeed_fp32"] for row in result["rows"]} == {None}
    listed = result["tensor_list"]
    assert (listed["algorithm"], listed["codec"]) == ("lion", "log")


def test_run_isa_is_that_of_every_step_and_restored(tmp_path, monkeypatch, few_rounds):
    monkeypatch.setenv("ZERO8_ISA", "")
    threads = torch.get_num_threads()
    seen, real = [], kernel.run

    def run(records, scalars, num_threads, isa):
        seen.append(isa)
        real(records, scalars, num_threads, isa)

    monkeypatch.setattr(kernel, "run", run)
    out = tmp_path / "step.json"
    words = ["--algorithm", "sgd", "--codec", "log", "--isa", "baseline", "--threads", "1"]
    step.run(parsed(out, *words, "--against", "torch"))
    assert set(seen) == {"baseline"}
    rows = json.loads(out.read_text())["rows"]
    assert {row["isa"] for row in rows if row["name"] == "zero8"} == {"baseline"}
    assert {(row["algorithm"], row["threads"]) for row in rows} == {("sgd", 1)}
    assert os.environ["ZERO8_ISA"] == "" and torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--numel", "70000"], "--numel: got 70000, expected a multiple of 4096, at least 65536"),
        (["--numel", "4096"], "--numel: got 4096, expected a multiple of 4096, at least 65536"),
        (["--threads", "0"], "--threads: got 0, expected at least 1"),
        (["--algorithm", "adam,lamb"], r"--algorithm: got 'lamb', expected one of \['adam'"),
        (["--codec", "gzip"], r"--codec: got 'gzip', expected one of \['dynamic', 'log', "),
        (["--isa", "mmx"], r"--isa: got 'mmx', expected one of \['baseline'"),
        (["--against", "torch,lion"], r"--against: got 'lion', expected one of \['deepspeed'"),
    ],
)
def test_run_bad_argument_says_what_is_expected(tmp_path, words, message):
    with pytest.raises(ValueError, match=message):
        step.run(parsed(tmp_path / "x.json", *words))


def test_command_bad_argument_is_a_usage_error(tmp_path, capsys):
    words = ["bench", "step", "--json", str(tmp_path / "x.json"), "--threads", "0"]
    with pytest.raises(SystemExit) as caught:
        cli.main(words)
    assert caught.value.code == 2
    assert "--threads: got 0, expected at least 1" in capsys.readouterr().err


# --- The check of the bits -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["param", "correction"])
def test_check_other_bits_stop_the_run_before_it_times(tmp_path, monkeypatch, name):
    def wrong(segment):
        skipped = real(segment)
        tensor = getattr(segment, name)
        if tensor is not None:
            tensor.view(torch.uint8)[-1] ^= 1
        return skipped

    real = reference.step
    monkeypatch.setattr(reference, "step", wrong)
    monkeypatch.setattr(step, "_time_out_of_cache", lambda plan: pytest.fail("has timed"))
    monkeypatch.setattr(step_kernel, "time_in_cache", lambda *_: pytest.fail("has timed"))
    with pytest.raises(
        RuntimeError, match=f"{name} of adam, codec .*bits differ from zero8.spec.reference"
    ):
        step.run(parsed(tmp_path / "x.json"))
    assert not list(tmp_path.iterdir())


def test_check_looks_at_everything_that_a_step_changes():
    for algorithm in ELEMENTWISE:
        sample = step_kernel.sample(algorithm.name, "log", BF16_CORRECTED, (5, 300))
        moments = {f"{name}{kind}" for name in algorithm.moment_names for kind in ("", "_scale")}
        assert step_kernel._results(sample).keys() == moments | {"param", "param_correction"}


# --- The tensors ---------------------------------------------------------------------------------


def test_model_shapes_at_the_default_size_are_400_of_1_to_10_million_elements():
    sizes = list(map(math.prod, model_shapes(CPU.numel)))
    assert len(sizes) == 400
    assert min(sizes) == 1 and 9_900_000 < max(sizes) <= 10_000_000
    decades = [sum(10**k <= size < 10 ** (k + 1) for size in sizes) for k in range(6)]
    assert min(decades) > 40  # log-spaced


@pytest.mark.parametrize("total", [step.LEAST_NUMEL, 999 * 4096, CPU.numel, 10 * CPU.numel])
def test_model_shapes_have_their_total_as_vectors_and_matrices(total):
    shapes = model_shapes(total)
    assert len(shapes) == 400
    assert sum(map(math.prod, shapes)) == total
    assert {len(shape) for shape in shapes} == {1, 2}
    assert all(shape[1] >= 64 and shape[1] & (shape[1] - 1) == 0 for shape in shapes if shape[1:])


def test_flat_shape_has_its_total():
    assert flat_shape(NUMEL) == (16, 4096)


# --- The contenders ------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ELEMENTWISE, ids=lambda one: one.name)
@pytest.mark.parametrize("device", [CPU, replace(GPU, place=CPU.place)], ids=["cpu", "gpu"])
def test_contenders_share_tensors_and_step_on_all_of_them(device, algorithm):
    params = flat_params(NUMEL, device)
    ours = zero8_contenders(["log"], params, algorithm.name)
    for contender, variant in zip(ours, device.variants, strict=True):
        shared = params.parameter(variant)
        assert (contender.param.dtype, shared.grad.dtype) == (variant.dtype, variant.grad_dtype)
        assert contender.param.data_ptr() == shared.data_ptr()
        assert contender.param.grad.data_ptr() == shared.grad.data_ptr()
        before = [t.clone() for t in contender.states]
        contender.step()
        arrays = len(algorithm.moments) + bool(variant.correction_bits)
        assert [t.numel() for t in contender.states] == [NUMEL] * arrays
        assert not all(map(torch.equal, contender.states, before))


def test_copies_leave_the_tensors_of_their_contenders_alone():
    ours = zero8_contenders(["log"], flat_params(NUMEL))
    copies = step_contenders.copies(ours)
    assert [copy.variant for copy in copies.values()] == [v.name for v in VARIANTS]
    for contender, copy in zip(ours, copies.values(), strict=True):
        assert copy.param is contender.param and copy.states is contender.states
        before = [t.clone() for t in (copy.param, *copy.states)]
        copy.step()
        assert all(map(torch.equal, (copy.param, *copy.states), before))


@pytest.mark.parametrize(
    "algorithm",
    # DeepSpeed's Lion compiles for a minute.
    ["adam", pytest.param("lion", marks=pytest.mark.slow)],
)
def test_deepspeed_has_the_threads_of_torch(algorithm):
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            (fp32, _), skipped = peer_contenders(["deepspeed"], flat_params(NUMEL), algorithm)
            assert skipped == []
            library = ctypes.CDLL(getattr(fp32.step.__self__, f"ds_opt_{algorithm}").__file__)
            assert library.omp_get_max_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_peer_whose_step_fails_is_skipped(monkeypatch):
    def fail(variant):
        raise OSError("no such thing\nas a second line")

    peer = step_contenders.PEERS["torch"]._replace(keywords=fail)
    monkeypatch.setitem(step_contenders.PEERS, "torchao", peer)
    found, skipped = peer_contenders(["torchao", "torch"], flat_params(NUMEL))
    assert [c.name for c in found] == ["torch"]
    assert skipped == [{"name": "torchao", "reason": "OSError: no such thing"}]


def test_peer_without_the_algorithm_is_neither_found_nor_skipped():
    assert peer_contenders(["torch", "deepspeed"], flat_params(NUMEL), "ademamix") == ([], [])


def test_peer_arrays_that_no_step_reads_are_not_counted(monkeypatch):
    """DeepSpeed's Lion has a second moment that it never reads.

    The arrays are its Python's, so an op that does nothing will do: its own compiles for a minute.
    """
    calls = {name: lambda *_: None for name in ("create_lion", "lion_update", "destroy_lion")}
    op = SimpleNamespace(__file__=kernel.module().__file__, **calls)  # for the OpenMP of a step
    builder = SimpleNamespace(load=lambda: op)
    monkeypatch.setattr(cpu_lion, "CPULionBuilder", lambda: builder)
    (fp32, bf16), _ = peer_contenders(["deepspeed"], flat_params(NUMEL), "lion")
    assert "exp_avg_sq" in fp32.step.__self__.state[fp32.param]
    assert (fp32.streams, bf16.streams) == ((4, 4, 4), (2, 2, 2))


def test_peer_moments_that_share_a_tensor_are_counted_each(monkeypatch):
    """bitsandbytes stacks two of AdEMAMix's."""

    class Stacked(torch.optim.Optimizer):
        def __init__(self, params, **hyper):
            super().__init__(params, {})

        def step(self):
            for p in self.param_groups[0]["params"]:
                two = torch.zeros(2, *p.shape, dtype=torch.uint8)
                self.state[p] = {"state1": two, "state2": two[0].clone()}

    package = ModuleType("bitsandbytes.optim")
    package.AdEMAMix8bit = Stacked
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    (found,), _ = peer_contenders(["bitsandbytes"], flat_params(NUMEL), "ademamix")
    assert found.streams == (4, 4, 1, 1, 1)


def test_settings_of_every_algorithm_are_keywords_of_its_optimizer():
    for algorithm in ELEMENTWISE:
        assert set(HYPER[algorithm.name]) <= set(algorithm.keywords)
    assert list(HYPER) == list(ZERO8) == [algorithm.name for algorithm in ELEMENTWISE]


@pytest.mark.parametrize("algorithm", ELEMENTWISE, ids=lambda one: one.name)
def test_scalars_of_a_sample_are_those_of_the_optimizer(algorithm, monkeypatch):
    """So the step that is checked, and timed in the cache, is that which is timed out of it."""
    seen, real = [], algorithm.scalars

    def scalars(self, *args, **kwargs):
        seen.append(real(*args, **kwargs))
        return seen[-1]

    monkeypatch.setattr(type(algorithm), "scalars", scalars)
    (fp32, *_) = zero8_contenders(["log"], flat_params(NUMEL), algorithm.name)
    del seen[1:]  # of the other variants
    for _ in range(2):
        fp32.step()
    monkeypatch.undo()
    assert seen == [scalars_at(algorithm, number) for number in (1, 2, 3)]


# --- Timing --------------------------------------------------------------------------------------


def test_interleaved_calls_take_turns():
    calls = []
    timed = [Timed(lambda: calls.append("a")), Timed(lambda: calls.append("b"), every=5)]
    usual, rare = interleaved(timed, rounds=10)
    assert (len(usual.times), len(rare.times)) == (10, 2)
    assert calls.count("a") == 13 and calls.count("b") == 2  # 3 rounds of warming up
    assert all(time > 0 for time in usual.times + rare.times)


@pytest.mark.slow
def test_waits_for_a_core_are_counted():
    """Beside an endless loop on the same core a call gets a part of it."""
    script = """if True:
        import os, time
        from zero8.bench.step.timing import Timed, interleaved
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        def busy():
            until = time.thread_time() + 0.1
            while time.thread_time() < until:
                sum(range(10000))
        other = os.fork()
        if not other:
            until = time.monotonic() + 60  # whatever becomes of the first process
            while time.monotonic() < until:
                pass
            os._exit(0)
        shared, = interleaved([Timed(busy)], rounds=1)
        os.kill(other, 9)
        print(shared.waited_ns / sum(shared.times))
        """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
    )
    assert 0.1 < float(done.stdout) < 1


@pytest.mark.parametrize(("shares", "is_busy"), [((0, 0.01, 0.5), False), ((0.5, 0, 0.03), True)])
def test_report_says_when_threads_waited_for_cores(shares, is_busy):
    """In the median of the rows: one may have been unlucky."""
    lines = busy_lines({"rows": [{"waited_share": share} for share in shares]})
    assert any("for 3.0% of their time" in line for line in lines) == bool(lines) == is_busy


def test_spread_is_per_element():
    values = spread([1000.0 * k for k in range(1, 12)], numel=1000)
    assert list(values.values()) == [6.0, 1.0, 2.0, 10.0]


def test_peak_extra_bytes_sees_memory_that_comes_and_goes():
    assert peak_extra_bytes(lambda: torch.ones(2**22)) == pytest.approx(2**24, rel=0.1)
    assert peak_extra_bytes(lambda: None) < 2**20


# --- Targets -------------------------------------------------------------------------------------


def made_up_row(name, variant, codec, ns, isa=None, algorithm="adam"):
    ratio, extra = 0.36 / ns, 4096
    return {
        "algorithm": algorithm,
        "name": name,
        "variant": variant,
        "codec": codec,
        "isa": isa,
        "ns_per_param": ns,
        "ratio_vs_deepspeed_fp32": ratio,
        "fraction_of_stream": 0.9,
        "extra_bytes": extra,
    }


def made_up_result(isa="avx512vbmi", **changes):
    times = {"log": 0.20, "dynamic": 0.45}
    rows = [
        made_up_row("zero8", v.name, codec, ns, isa)
        for v in VARIANTS
        for codec, ns in times.items()
    ]
    slow = {"deepspeed": 0.36, "torch": 0.60, "torchao": 16.0, "bitsandbytes": 34.0}
    rows += [made_up_row(name, FP32.name, None, ns) for name, ns in slow.items()]
    rows.append(made_up_row("deepspeed", BF16.name, None, 0.22))
    return {
        "default": "log",
        "algorithms": ["adam"],
        "threads": 2,
        "rows": rows,
        "in_cache": [{"variant": "fp32", "isa": isa, "ns_per_param": 0.57}],
        "tensor_list": {"tensors": 400, "ratio": 1.1},
        "machine": {"page_bytes": 4096},
    } | changes


def test_checks_hold_each_target_against_its_row():
    """log: 1.8 times DeepSpeed's fp32, 1.1 times its bf16 states, 0.9 of the stream."""
    met = {check["target"]: check["met"] for check in step_targets.checks(made_up_result())}
    assert len(met) == 10
    assert [target for target, good in met.items() if not good] == [
        "zero8 adam bf16 `log`, speed over DeepSpeed's fp32, AVX-512, at least",
        "zero8 adam fp32 `dynamic`, speed over DeepSpeed's fp32, AVX-512, at least",
        "zero8 adam fp32 `log`, fraction of its own stream, AVX-512, at least",
    ]


def test_checks_of_avx2_have_other_limits():
    """The same numbers miss other targets: DeepSpeed's bf16 states are slow on AVX2."""
    checks = step_targets.checks(made_up_result("avx2"))
    assert [check["target"] for check in checks if not check["met"]] == [
        "zero8 adam bf16 `log`, speed over DeepSpeed's bf16 states, AVX2, at least",
    ]


@pytest.mark.parametrize("isa", ["baseline", "neon"])
def test_checks_of_instruction_sets_without_limits_are_those_of_all(isa):
    checks = step_targets.checks(made_up_result(isa))
    assert [check["target"].split(",")[0] for check in checks] == ["400 tensors", "zero8"]


def test_checks_of_what_was_not_measured_are_left_out():
    rows = [
        row | {"ratio_vs_deepspeed_fp32": None, "extra_bytes": None}
        for row in made_up_result()["rows"]
        if row["codec"] == "log"
    ]
    checks = step_targets.checks(made_up_result(rows=rows))
    assert [check["target"].split(",")[0] for check in checks] == [
        "zero8 adam fp32 `log`",
        "400 tensors",
    ]


@pytest.mark.parametrize(("isa", "limit"), [("avx512", 0.85), ("avx2", 0.6)])
@pytest.mark.parametrize("algorithm", ["lion", "sgd", "ademamix"])
def test_checks_hold_every_algorithm_against_its_stream(algorithm, isa, limit):
    """Adam's targets are not theirs, even if the same peers were measured."""
    peers = [made_up_row("torch", FP32.name, None, 1.0, algorithm=algorithm)]
    peers.append(made_up_row("torch", FP32.name, None, 1.0))
    for fraction in (limit, limit - 0.01):
        ours = made_up_row("zero8", FP32.name, "log", 0.2, isa, algorithm)
        ours |= {"fraction_of_stream": fraction, "extra_bytes": None}
        rows = [ours, *peers]
        first, _ = step_targets.checks(made_up_result(rows=rows, algorithms=[algorithm]))
        assert first["target"].startswith(f"zero8 {algorithm} fp32 `log`, fraction of its own")
        assert (first["limit"], first["met"]) == (limit, fraction == limit)


def test_checks_allow_the_memory_of_the_algorithm_with_the_most_moments():
    def limit_of(*algorithms):
        return step_targets.checks(made_up_result(algorithms=algorithms))[-1]["limit"]

    more = limit_of("lion", "ademamix") - limit_of("lion")
    assert more == 2 * (limit_of("adam") - limit_of("lion")) == 2 * 2 * 2 * 4 * 4096
