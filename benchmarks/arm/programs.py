# SPDX-License-Identifier: Apache-2.0
"""One step as a static program of a machine, compiled as the op is, and what it reads."""

import os
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.arm.machines import Machine
from zero8.bench.step import kernel as step_kernel
from zero8.bench.step.variants import Variant
from zero8.op import build, kernel
from zero8.op.codec_maps import codec_maps
from zero8.op.sources import source_folder
from zero8.spec.codec import DEFAULT_CODEC
from zero8.spec.segment import Moment, Segment

FLOAT32 = "float32"
"""Instead of a codec: moments that have none, as an fp32 Adam's."""
BLOCKS = 8
"""Of one traced step."""
WARM_UP_STEPS = 3
_ALIGNMENT_BYTES = 64
_DRIVER = Path(__file__).with_name("traced.cpp")


@dataclass(frozen=True)
class Program:
    """A compiled step.

    Attributes:
        machine: what it runs on.
        path: of the program.
        symbol: the function of the step.
    """

    machine: Machine
    path: Path
    symbol: str


def compiled(machine: Machine, algorithm: str, codec: str, folder: Path) -> Program:
    """Compile the step of a machine, with the flags of the op.

    Raises:
        RuntimeError: if the compiler fails, with the first lines of what it says.
    """
    names = algorithm.capitalize(), codec.capitalize()
    symbol = f"step_blocks_{machine.target}_{names[0]}_{names[1]}"
    source, path = folder / f"{symbol}.cpp", folder / symbol
    source.write_text(
        f"#define ZERO8_ALGORITHM {names[0]}\n#define ZERO8_CODEC {names[1]}\n"
        f'#include "step_{machine.target}.cpp"\n'
    )
    flags = [*build.FLAGS, "-std=c++17", f"-I{source_folder()}", f"-DZERO8_STEP={symbol}"]
    command = [machine.compiler, *flags, "-static", _DRIVER, source, "-o", path]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        said = "\n".join(done.stderr.splitlines()[:10])
        raise RuntimeError(f"{machine.compiler} of step_{machine.target}.cpp: {said}")
    return Program(machine, path, symbol)


def stepped(algorithm: str, codec: str, variant: Variant) -> Segment:
    """Return a segment of BLOCKS blocks after some steps here, about to take the next one."""
    shape, coded = (BLOCKS, step_kernel.BLOCK_SIZE), DEFAULT_CODEC if codec == FLOAT32 else codec
    segment = step_kernel.sample(algorithm, coded, variant, shape)
    if codec == FLOAT32:
        zeros = [Moment(torch.zeros(segment.param.numel())) for _ in segment.moments]
        segment = replace(segment, codec=None, moments=zeros)
    for number in range(1, WARM_UP_STEPS + 1):
        kernel.step([step_kernel.prepared(segment, number)], 1, os.environ.get("ZERO8_ISA"))
    return step_kernel.prepared(segment, WARM_UP_STEPS + 1)


def standard_input(segment: Segment) -> bytes:
    """Return what the program reads: a segment whose addresses are places in the bytes behind."""
    records, scalars = kernel.packed([segment])
    record = records[0]
    parts, size = [bytes(_ALIGNMENT_BYTES)], _ALIGNMENT_BYTES
    fields = [(record, "param", segment.param), (record, "grad", segment.grad)]
    for number, moment in enumerate(segment.moments):
        of_moment = record["moments"][number]
        fields.append((of_moment, "values", moment.values))
        if moment.scales is not None:
            fields.append((of_moment, "scales", moment.scales))
    for part, name, tensor in fields:
        content = tensor.flatten().view(torch.uint8).numpy().tobytes()
        content += bytes(-len(content) % _ALIGNMENT_BYTES)
        part[name] = size
        parts.append(content)
        size += len(content)
    head = np.array([BLOCKS, size])
    return b"".join([x.tobytes() for x in (head, records, scalars, codec_maps())] + parts)
