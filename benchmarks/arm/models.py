# SPDX-License-Identifier: Apache-2.0
"""What llvm-mca says of straight code that is repeated: cycles on a modelled processor.

It knows the latency of each instruction, the units that execute it, and the size of buffers.  It
takes all loads to hit the first-level cache, all branches to be predicted, and stores not to be
read soon; and its decoder never falls behind.
"""

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.arm.machines import LEAST_LLVM, LLVM, Machine, llvm_tool
from zero8.bench.usage import UsageError


@dataclass(frozen=True)
class Modelled:
    """Straight code, repeated, on a modelled processor; all per repetition.

    Attributes:
        instructions: number of them.
        uops: micro-operations.
        cycles: in the steady state.
        least_cycles: that the busiest unit alone takes.
        busiest: name of the unit that is busiest.
        busy: share of the cycles in which it is.
    """

    instructions: int
    uops: float
    cycles: float
    least_cycles: float
    busiest: str
    busy: float


def modelled(lines: Sequence[str], machine: Machine, model: str, repeats: int) -> Modelled:
    """Return what llvm-mca says of instructions, which are repeated so often, and twice as often.

    Raises:
        RuntimeError: if it does not know an instruction.
    """
    once, twice = (_json_of(lines, machine, model, n * repeats) for n in (1, 2))
    return of_results(once, twice)


def of_results(once: dict, twice: dict) -> Modelled:
    """Return the steady state from two results of llvm-mca, the second of more repetitions."""
    first, second = (result["CodeRegions"][0]["SummaryView"] for result in (once, twice))
    more = second["Iterations"] - first["Iterations"]
    cycles = (second["TotalCycles"] - first["TotalCycles"]) / more
    unit, busy_cycles = busiest_unit(twice)
    return Modelled(
        instructions=second["Instructions"] // second["Iterations"],
        uops=second["TotaluOps"] / second["Iterations"],
        cycles=cycles,
        least_cycles=second["BlockRThroughput"],
        busiest=unit,
        busy=busy_cycles / cycles,
    )


def busiest_unit(result: dict) -> tuple[str, float]:
    """Return the unit that is busy for the most cycles per repetition, and these cycles."""
    region, names = result["CodeRegions"][0], result["TargetInfo"]["Resources"]
    total = len(region["Instructions"])  # the sum stands behind the last instruction
    sums = {
        names[entry["ResourceIndex"]]: entry["ResourceUsage"]
        for entry in region["ResourcePressureView"]["ResourcePressureInfo"]
        if entry["InstructionIndex"] == total
    }
    busiest = max(sums, key=sums.__getitem__)
    return busiest.replace("\0", ""), sums[busiest]


def check_models(machines: Sequence[Machine]) -> str:
    """Return the version of llvm-mca, and its processor here.

    Raises:
        UsageError: if it is missing, or too old for a model.
    """
    tool = llvm_tool("llvm-mca")
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=True).stdout
    version, host = (re.search(p, said) for p in (r"version (\S+)", r"Host CPU: (\S+)"))
    if version is None or int(version[1].partition(".")[0]) < LEAST_LLVM:
        raise UsageError(
            f"{tool}: got version {version[1] if version else 'unknown'}, expected at least "
            f"{LEAST_LLVM}, which has the models {', '.join(m for x in machines for m in x.models)}"
            f": apt-get install llvm-{LLVM}"
        )
    return f"LLVM {version[1]}, which takes this processor for {host[1] if host else 'unknown'}"


def _json_of(lines: Sequence[str], machine: Machine, model: str, repeats: int) -> dict:
    command = [llvm_tool("llvm-mca"), f"-mtriple={machine.triple}", f"-mcpu={model}"]
    command += [f"-iterations={repeats}", "--json", "-"]
    given = "\n".join([*lines, ""])
    done = subprocess.run(command, input=given, capture_output=True, text=True)
    if done.returncode != 0:
        said = "\n".join(done.stderr.splitlines()[:6])
        raise RuntimeError(f"llvm-mca -mcpu={model}: {said}")
    # Names of numbered units hold a NUL, as it writes them.
    return json.loads(done.stdout, strict=False)
