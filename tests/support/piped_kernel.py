# SPDX-License-Identifier: Apache-2.0
"""The CPU's kernel in a program (piped_kernel.cpp): emulated, or under the thread sanitizer."""

import subprocess
from collections.abc import Sequence

import kernel_steps
import numpy as np
import torch
from segments import integers, tensors
from torch import Tensor

from zero8.op.codec_maps import codec_maps
from zero8.spec.segment import Segment

_ALIGNMENT_BYTES = 64


class PipedKernel:
    """The kernel, called as the one of this processor would be."""

    def __init__(self, command: Sequence[str], target: str):
        """Take the command that runs the program, without arguments, and a target's name."""
        self._command, self._target = command, target

    def _run(self, task: str, *parts: np.ndarray) -> np.ndarray:
        """Return what the program writes, as bytes."""
        sent = b"".join(part.tobytes() for part in parts)
        command = [*self._command, task, self._target]
        done = subprocess.run(command, input=sent, capture_output=True, timeout=300)
        assert done.returncode == 0, done.stderr.decode()
        return np.frombuffer(bytearray(done.stdout), np.uint8)

    def operations(self, a: Tensor, b: Tensor, c: Tensor) -> dict[str, Tensor]:
        """Return a * b, a * b + c, a * b - c, a / b and the root of a, as the kernel makes them."""
        names = ("mul", "fma", "fms", "div", "sqrt")
        counted = np.array([a.numel()])
        written = self._run("operations", counted, a.numpy(), b.numpy(), c.numpy())
        results = torch.from_numpy(written).view(torch.float32).view(len(names), -1)
        return dict(zip(names, results, strict=True))

    def step(self, segments: Sequence[Segment], num_threads: int = 2) -> list[int]:
        """Take one step on every segment, in place; return the blocks left as they were."""
        records, scalars = kernel_steps.packed(segments)
        parts, size = [np.zeros(_ALIGNMENT_BYTES, np.uint8)], _ALIGNMENT_BYTES
        arrays: dict[int, tuple[Tensor, int]] = {}
        for record, segment in zip(records, segments, strict=True):
            for name, tensor in buffers(segment).items():
                part_of_record, field = place_of(record, segment, name)
                if tensor.data_ptr() in arrays:  # of two records, which then share it
                    part_of_record[field] = arrays[tensor.data_ptr()][1]
                    continue
                # As far from an aligned address as here.
                begin = size + int(part_of_record[field]) % _ALIGNMENT_BYTES
                end = -(-(begin + tensor.nbytes) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
                part = np.zeros(end - size, np.uint8)
                content = integers(tensor).flatten().view(torch.uint8).numpy()
                part[begin - size :][: tensor.nbytes] = content
                parts.append(part)
                arrays[tensor.data_ptr()] = tensor, begin
                part_of_record[field], size = begin, end
        sizes = np.array([len(records), len(scalars), size, num_threads])
        written = self._run("step", sizes, records, scalars, codec_maps(), *parts)
        counts = written[: records.nbytes].view(records.dtype)["nonfinite_blocks"].tolist()
        memory = torch.from_numpy(written[records.nbytes :])
        for tensor, begin in arrays.values():
            held = memory[begin : begin + tensor.nbytes].clone().view(tensor.dtype)
            tensor.copy_(held.view(tensor.shape))
        return counts


def buffers(segment: Segment) -> dict[str, Tensor]:
    """Return all tensors of a segment by name."""
    return tensors(segment) | {"grad": segment.grad}


def place_of(record: np.void, segment: Segment, name: str) -> tuple[np.void, str]:
    """Return where the address of a tensor stands in the kernel's record: a part, and its field."""
    moment = name.removesuffix("_scale")
    if moment not in segment.algorithm.moment_names:
        return record, name
    part = record["moments"][segment.algorithm.moment_names.index(moment)]
    return part, "values" if moment == name else "scales"
