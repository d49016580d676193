# SPDX-License-Identifier: Apache-2.0
"""Steps of the kernels over segments, without an optimizer."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from zero8.op import kernel
from zero8.op.codec_maps import codec_maps
from zero8.op.cuda import cuda_kernel
from zero8.op.structs import DTYPE_NUMBERS, SEGMENT
from zero8.op.threads import alive
from zero8.spec.segment import Segment

# The attributes of segments that records have as they are.
WRITTEN = ("param grad moments codec grid first rounding correction weight_sums row_scales").split()


def step(
    segments: Sequence[Segment], num_threads: int | None = None, isa: str | None = None
) -> list[int]:
    """Take one step on every segment, in place; return the blocks that each has left unchanged."""
    records, scalars = packed(segments)
    run(records, scalars, num_threads, isa)
    counts: list[int] = records["nonfinite_blocks"].tolist()
    return counts


def on_every_isa(num_threads: int = 2) -> dict[str, Callable]:
    """Return `step` for each instruction set of this processor."""
    return {isa: partial(step, isa=isa, num_threads=num_threads) for isa in kernel.isas()}


def packed(segments: Sequence[Segment]) -> tuple[np.ndarray, np.ndarray]:
    """Return the kernel's structs for segments of one algorithm, and for their scalars."""
    records = np.zeros(len(segments), SEGMENT)
    distinct = {scalars: n for n, scalars in enumerate({one.scalars: 0 for one in segments})}
    for record, segment in zip(records, segments, strict=True):
        attributes = {name: getattr(segment, name) for name in WRITTEN}
        kernel.write_record(record, algorithm=segment.algorithm.kernel.number, **attributes)
        record["scalars"] = distinct[segment.scalars]
        phases = [moment.phase for moment in segment.moments]
        record["moments"]["phase"][: len(phases)] = phases
        record["param_phase"] = segment.param_phase
        if segment.copy is not None:
            record["copy"] = segment.copy.data_ptr()
            record["copy_dtype"] = DTYPE_NUMBERS[segment.copy.dtype]
    return records, kernel.packed_scalars(list(distinct))


def run(
    records: np.ndarray, scalars: np.ndarray, num_threads: int | None = None, isa: str | None = None
) -> None:
    """Take one step on `packed` segments, whose tensors the caller keeps alive."""
    number = kernel.isas()[isa or kernel.default_isa()]
    kernel.module().step(records, scalars, codec_maps(), alive(num_threads), number)


def step_on_gpu(segments: Sequence[Segment], backend: str | None = None) -> kernel.BlockCounts:
    """Take one step on every segment, all on one GPU, in one launch on the current stream."""
    device = segments[0].param.device
    return cuda_kernel(device, backend).step(*packed(segments))
