# SPDX-License-Identifier: Apache-2.0
"""The kernels' threads, with the thread sanitizer on.

It does not understand libgomp, so the kernels are linked with gomp_of_threads.cpp instead.  It sees
whole vectors, but not the masked ones with which AVX2 and AVX-512 end a block; the baseline has
none.
"""

import math
import platform
import sys

import kernel_steps
import processes
import pytest
import torch
from piped_kernel import PipedKernel
from places import SUPPORT
from segments import (
    CODEC_NAMES,
    DTYPES,
    HYPERS,
    Place,
    assert_same,
    copied,
    gradient,
    make,
    scalars_at,
)
from test_csrc import COMPILER, CSRC, OURS, WARNINGS, compile_all, output_of
from test_sanitized import run, watched_op

from zero8.op import kernel
from zero8.spec.segment import Rounding

SANITIZER = "-fsanitize=thread"
FLAGS = ["-O1", "-g1", SANITIZER, *WARNINGS, "-ffp-contract=off"]
SERVED = list(kernel.isas())
ADAMW = HYPERS["adamw"]
INT8 = torch.int8, torch.float32, Rounding.DITHER
# Several threads cut each of these, at blocks of both sizes.
PLACES = [Place((999, 129), 128, 0, 999 * 129), Place((40, 5000), 4096, 0, 40 * 5000)]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The program, its OpenMP, and the kernels."""
    sources = [CSRC / f"{name}.cpp" for name in ("dispatch", *(f"step_{t}" for t in OURS))]
    sources += [SUPPORT / f"{name}.cpp" for name in ("piped_kernel", "gomp_of_threads")]
    return compile_all(sources, FLAGS, tmp_path_factory.mktemp("objects"))


@pytest.fixture(scope="module")
def command(objects, tmp_path_factory):
    """The command of the program, which is linked without libgomp."""
    program = tmp_path_factory.mktemp("program") / "piped_kernel"
    output_of([*COMPILER, SANITIZER, "-pthread", *objects, "-o", program])
    # Linux may spread addresses wider than this sanitizer expects.
    is_spread = "unexpected memory mapping" in processes.run([program, "", "spread?"]).stderr
    return [*(["setarch", platform.machine(), "-R"] if is_spread else []), str(program)]


@pytest.fixture(scope="module")
def races(command, tmp_path_factory):
    """Run `forward_races.py`; return the reports on the op, the sole library that is watched.

    Other reports are of torch's, whose locks the sanitizer does not see.
    """
    op = watched_op(["-O1", "-g1", SANITIZER], tmp_path_factory.mktemp("watched") / "op")
    program = *command[:-1], sys.executable, SUPPORT / "forward_races.py"

    def reports(*words):
        options = "exitcode=0 history_size=7"
        done = run(op, "libtsan.so", *program, *words, TSAN_OPTIONS=options)
        assert done.returncode == 0, done.stderr
        return [one for one in done.stderr.split("WARNING: ") if "zero8::" in one]

    return reports


@pytest.fixture(autouse=True)
def up_to_the_first_race(monkeypatch):
    monkeypatch.setenv("TSAN_OPTIONS", "halt_on_error=1")


def segments_of(codec):
    segments = [
        make(codec, place, scalars_at(1, ADAMW), *dtypes)
        for place in PLACES
        for dtypes in (*DTYPES.values(), INT8)
    ]
    for number, segment in enumerate(segments):
        segment.grad.copy_(gradient(0, segment.grad.numel(), number, segment.grad.dtype))
        segment.grad[:: 7 * 129] = math.nan
    return segments


@pytest.mark.parametrize("codec", CODEC_NAMES, ids=str)
@pytest.mark.parametrize("isa", SERVED)
def test_threads_under_the_thread_sanitizer_do_not_race_and_write_the_bits_of_one(
    command, isa, codec
):
    alone = segments_of(codec)
    together = [copied(segment) for segment in alone]
    expected = kernel_steps.step(alone, num_threads=1, isa=isa)
    assert PipedKernel(command, isa).step(together, num_threads=3) == expected
    for number, pair in enumerate(zip(together, alone, strict=True)):
        assert_same(*pair, f"segment {number}")


@pytest.mark.parametrize("isa", SERVED)
def test_thread_sanitizer_reports_two_threads_in_one_segment(command, isa):
    """Guards the test above: the sanitizer sees what the kernel of each target loads and stores."""
    segment = make(None, PLACES[1], scalars_at(1, ADAMW))
    with pytest.raises(AssertionError, match=f"data race(.|\n)*zero8::{isa}::"):
        PipedKernel(command, isa).step([segment, segment])


@pytest.mark.parametrize("framework", ["ZeRO-3", "FSDP2"])
def test_steps_behind_the_forward_under_the_thread_sanitizer_do_not_race_with_it(races, framework):
    """It sees the step write weights and the forward read them: without waits it reports both."""
    assert races(framework) == []
    assert any("memmove" in report for report in races(framework, "early"))
