# SPDX-License-Identifier: Apache-2.0
"""Steps, and states from elsewhere, with the sanitizers of addresses and undefined behaviour on."""

import os
import sys
from functools import partial

import processes
import pytest
from places import FOLDERS, ROOT, TESTS
from test_csrc import COMPILER, CSRC, SANITIZERS, compile_all, output_of, python_headers

from zero8.op import build


def runtime(name):
    """Return the path of a library of the compiler's."""
    return output_of([COMPILER[0], f"-print-file-name={name}"]).strip()


def watched_op(watched, folder):
    """Compile the op with a sanitizer; return its path.

    The baseline alone is watched: the sanitizers do not see masked vectors.
    """
    folder.mkdir()
    watched = [*watched, "-ffp-contract=off", "-fPIC"]
    quiet = ["binding", *(path.stem for path in build.sources() if path.stem.startswith("step_"))]
    quiet.remove("step_baseline")
    sources = [path for path in build.sources() if path.stem not in quiet]
    made = compile_all(sources, watched, folder)
    made += compile_all(
        [CSRC / f"{name}.cpp" for name in quiet], ["-O0", "-fPIC", *python_headers()], folder
    )
    path = folder / f"{build.NAME}.so"
    output_of([*COMPILER, *watched, "-shared", *made, "-o", path])
    return path


def run(op, library, *command, **environment):
    """Run a command with a sanitizer's library and the op that it watches; return the process."""
    return processes.run(
        command,
        seconds=500,
        # libstdc++ too, or the sanitizer does not find what throws.
        LD_PRELOAD=f"{runtime(library)} {runtime('libstdc++.so.6')}",
        SANITIZED_OP=str(op),
        ZERO8_ISA="baseline",
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join([str(ROOT), *FOLDERS]),
        **environment,
    )


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """Run Python with the op under the sanitizers of addresses and undefined behaviour."""
    flags = [*SANITIZERS, "-fsanitize=float-cast-overflow"]
    op = watched_op(flags, tmp_path_factory.mktemp("sanitized") / "op")
    # Python leaks when it exits.
    options = "detect_leaks=0:allocator_may_return_null=1"
    return partial(run, op, "libasan.so", sys.executable, ASAN_OPTIONS=options)


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_steps_and_states_that_arrive_under_the_sanitizers_touch_no_other_memory(python, tmp_path):
    names = "record_check random_steps kernel_convert state_arrival zero_arrival".split()
    files = [path for name in names for path in TESTS.rglob(f"test_{name}.py")]
    # -s: a sanitizer ends the process, with whatever pytest has captured until then.
    options = ["-qs", "-p", "sanitized_op", "-p", "no:cacheprovider", "--rootdir", ROOT]
    options.append(f"--basetemp={tmp_path / 'b'}")
    done = python("-m", "pytest", *options, *files)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    assert " passed" in done.stdout


@pytest.mark.slow
def test_sanitizer_stops_a_step_over_memory_that_is_not_its_own(python, tmp_path):
    """Guards the tests above: without the check of records the sanitizer does end the process."""
    program = tmp_path / "program.py"
    program.write_text(
        "import ctypes, os, torch\n"
        "import sanitized_op\n"
        "sanitized_op.pytest_configure(None)\n"
        "from segments import Place, make, scalars_at\n"
        "import kernel_steps\n"
        "hyper = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.1)\n"
        "made = make('log', Place((4, 1000), 256, 0, 4000), scalars_at(1, hyper))\n"
        "records, scalars = kernel_steps.packed([made])\n"
        "codes = torch.zeros(100, dtype=torch.uint8)\n"
        "records['moments']['values'][0, 0] = codes.data_ptr()\n"
        "kernel_steps.run(records, scalars, 1, 'baseline')\n"
        "print('survived')\n"
    )
    done = python(program)
    assert done.returncode != 0 and "survived" not in done.stdout
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
