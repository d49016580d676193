# SPDX-License-Identifier: Apache-2.0
"""Estimate what Adam's step costs on ARM processors: by models, and by emulation.

Compiles the step for NEON and AVX2 (and, with --scalar, in plain C++ for ARM), traces a step under
QEMU, and lets llvm-mca model its two loops and a whole block.  AVX2 is also timed, on this
processor, to compare model and measurement.  Writes OUT (JSON) and tables (.md) beside it.

Keys of the JSON object:
    versions, commit, cpu, llvm, command, seconds, cpu_seconds: what was run.
    clock: how the clock was measured.
    traced: instructions per parameter of a traced step, a row per codec, variant and target.
    loops: what llvm-mca says, a row per codec, variant, target, part of the step and model: its two
        loops, and a whole block of median length.  `share` of all iterations were just so.
    measured: times in the cache with AVX2, a row per codec and variant; none with moments in
        float32.
    checks: the targets.
"""

import argparse
import os
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.arm import machines, measured
from benchmarks.arm.machines import AVX2, NEON, SCALAR, Machine
from benchmarks.arm.models import check_models, modelled
from benchmarks.arm.programs import BLOCKS, FLOAT32, Program, compiled, standard_input, stepped
from benchmarks.arm.report import markdown
from benchmarks.arm.targets import checks
from benchmarks.arm.traces import VECTORS, Trace, traced
from benchmarks.fidelity import runs
from zero8.bench import record
from zero8.bench.step.kernel import BLOCK_SIZE
from zero8.bench.step.variants import BF16, FP32, Variant
from zero8.bench.usage import UsageError, check_names, chosen
from zero8.op import build
from zero8.spec.codec import CODECS

ALGORITHM = "adam"
VARIANTS = (FP32, BF16)
_DEFAULT_CODECS = ("log", "dynamic", FLOAT32)
_LOOP_REPEATS, _BLOCK_REPEATS = 200, 8


def parts_of(trace: Trace, machine: Machine) -> dict[str, tuple[Sequence[int], int, float]]:
    """Return the modelled parts of a step: addresses, their parameters, and how often just so."""
    chunk = VECTORS * machine.lanes
    loops = {"square roots": machine.root, "divisions": machine.division}
    found = {name: trace.loop(pattern) for name, pattern in loops.items()}
    parts = {name: (loop.addresses, chunk, loop.share) for name, loop in found.items()}
    block = trace.block(machine.root, BLOCK_SIZE // machine.lanes)
    return {**parts, "block": (block, BLOCK_SIZE, 1.0)}


def rows_of(program: Program, codec: str, variant: Variant, log: Path) -> tuple[dict, list[dict]]:
    """Trace a step; return its row, and a row per modelled part and model."""
    machine, segment = program.machine, stepped(ALGORITHM, codec, variant)
    trace = traced(program, standard_input(segment), log)
    case = {"codec": codec, "variant": variant.name, "target": machine.target}
    count = len(trace.addresses)
    step = {**case, "instructions_per_param": count / (BLOCKS * BLOCK_SIZE)}
    rows = []
    for part, (addresses, params, share) in parts_of(trace, machine).items():
        lines = trace.lines(addresses)
        for model in machine.models:
            repeats = _BLOCK_REPEATS if part == "block" else _LOOP_REPEATS
            found = asdict(modelled(lines, machine, model, repeats))
            found["cycles_per_param"] = found["cycles"] / params
            rows.append({**case, "part": part, "model": model, "params": params, **found})
            rows[-1]["share"] = share
    return step, rows


def measure(codecs: Sequence[str], chosen_machines: Sequence[Machine]) -> dict:
    """Return the result, all but the time and the command."""
    result: dict = {
        "versions": record.versions(),
        "commit": record.commit(),
        "cpu": record.cpu(),
        "llvm": check_models(chosen_machines),
        "clock": measured.CLOCK_METHOD,
        "traced": [],
        "loops": [],
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for codec in codecs:
            for machine in chosen_machines:
                program = compiled(machine, ALGORITHM, codec, folder)
                for variant in VARIANTS:
                    step, rows = rows_of(program, codec, variant, folder / "log")
                    result["traced"].append(step)
                    result["loops"] += rows
        names, coded = [variant.name for variant in VARIANTS], [c for c in codecs if c in CODECS]
        result["measured"] = measured.measured(ALGORITHM, coded, names, folder)
    return {**result, "checks": checks(result)}


def main(argv: Sequence[str] | None = None) -> int:
    """Model, measure and write both files."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.arm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, metavar="OUT", help="result file")
    parser.add_argument("--codec", metavar="NAME,...", help=f"default {','.join(_DEFAULT_CODECS)}")
    parser.add_argument("--scalar", action="store_true", help="ARM without NEON's vectors too")
    arguments = parser.parse_args(argv)
    codecs = chosen(arguments.codec, _DEFAULT_CODECS)
    wanted = (AVX2, NEON, *(SCALAR,) * arguments.scalar)
    try:
        check_names("--codec", codecs or ("",), (*CODECS, FLOAT32))
        if arguments.scalar and FLOAT32 in codecs:
            raise UsageError(
                f"--scalar: GCC makes vectors of the scalar loops with {FLOAT32} moments, which "
                "have no model here; name the others by --codec"
            )
        machines.check_programs(wanted)
        check_models(wanted)
        if "avx2" not in build.served_targets():
            raise UsageError("this processor has no AVX2, with whose time the models are compared")
    except UsageError as error:
        parser.error(str(error))
    os.environ["ZERO8_ISA"] = "avx2"  # of all steps here, and of what is compiled for them
    began = time.perf_counter()
    result = measure(codecs, wanted)
    words = ["python", "-m", "benchmarks.arm", "--json", str(arguments.json)]
    words += ["--codec", ",".join(codecs)] * (codecs != _DEFAULT_CODECS)
    words += ["--scalar"] * arguments.scalar
    result |= runs.spent(began, shlex.join(words))
    record.print_checks(result["checks"])
    print("wrote", *record.write(result, arguments.json, markdown))
    return 0
