# SPDX-License-Identifier: Apache-2.0
"""The kernels' threads, with the thread sanitizer on.

It does not understand libgomp, so the kernels are linked with gomp_of_threads.cpp instead.  It sees
whole vectors, but not the masked ones with which AVX2 and AVX-512 end a block; the baseline has
none.
"""

import platform
import re

import processes
import pytest
from places import SUPPORT
from test_csrc import COMPILER, CSRC, OURS, WARNINGS, compile_all, output_of

from zero8.op import kernel

SANITIZER = "-fsanitize=thread"
FLAGS = ["-O1", "-g1", SANITIZER, *WARNINGS, "-ffp-contract=off"]
SERVED = list(kernel.isas())
REPORTED = 66
"""The exit status of a program in which the sanitizer found a race."""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """The driver, its OpenMP, and the kernels."""
    sources = [CSRC / f"{name}.cpp" for name in ("dispatch", *(f"step_{t}" for t in OURS))]
    sources += [SUPPORT / f"{name}.cpp" for name in ("csrc_driver", "gomp_of_threads")]
    return compile_all(sources, FLAGS, tmp_path_factory.mktemp("objects"))


def link(objects, folder):
    """Link without libgomp; return the program."""
    program = folder / "csrc_driver"
    output_of([*COMPILER, SANITIZER, "-pthread", *objects, "-o", program])
    return program


@pytest.fixture(scope="module")
def program(objects, tmp_path_factory):
    return link(objects, tmp_path_factory.mktemp("program"))


def run(*command):
    """Run a program up to the first race; return the finished process."""
    options = {"TSAN_OPTIONS": f"halt_on_error=1:exitcode={REPORTED}"}
    done = processes.run(command, seconds=400, **options)
    if "unexpected memory mapping" in done.stderr:
        # The kernel spreads addresses wider than this sanitizer expects.
        command = ("setarch", platform.machine(), "-R", *command)
        done = processes.run(command, seconds=400, **options)
    return done


def test_threads_under_the_thread_sanitizer_do_not_race_and_write_the_bits_of_one(program):
    done = run(program)
    assert done.returncode == 0, done.stdout + done.stderr[:6000]
    assert done.stdout.split() == SERVED
    assert "ThreadSanitizer" not in done.stderr


@pytest.mark.parametrize("isa", SERVED)
def test_thread_sanitizer_reports_two_threads_in_one_segment(program, isa):
    """Guards the test above: the sanitizer sees what the kernel of each target loads and stores."""
    done = run(program, isa)
    assert done.returncode == REPORTED, done.stdout + done.stderr
    assert "ThreadSanitizer: data race" in done.stderr
    assert f"zero8::{isa}::" in done.stderr


def test_thread_sanitizer_reports_a_counter_that_is_not_atomic(objects, tmp_path):
    """Guards the first test: several threads do count blocks of one segment."""
    plain = "-D__atomic_fetch_add(counter, value, order)=(*(counter) += (value))"
    made = compile_all([CSRC / "dispatch.cpp"], [*FLAGS, plain], tmp_path)
    done = run(link([*made, *(path for path in objects if path.stem != "dispatch")], tmp_path))
    assert done.returncode == REPORTED, done.stdout + done.stderr
    assert "ThreadSanitizer: data race" in done.stderr
    assert re.search(r"#0 .*step_range", done.stderr)
