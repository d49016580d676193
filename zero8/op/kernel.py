# SPDX-License-Identifier: Apache-2.0
"""Calls the compiled step on a list of segments."""

import contextlib
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from zero8.op import build, describe
from zero8.op.codec_maps import codec_maps
from zero8.op.structs import (
    DTYPE_NUMBERS,
    FLOAT32_MOMENTS,
    MOST_SCALARS,
    SEGMENT,
    TENSOR,
    scalars_dtype,
)
from zero8.op.threads import alive, host_share, step_threads
from zero8.spec.adam import ADAM
from zero8.spec.algorithm import Algorithm, Scalars
from zero8.spec.buffers import check_buffer
from zero8.spec.grid import check_block_size
from zero8.spec.int8_rows import SCALE_DTYPES
from zero8.spec.segment import Segment

# Dtypes of parameters, and for each the dtypes of its gradients.
DTYPES = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.float32, torch.bfloat16),
}
# Of INT8 weights, on the CPU, which come with scales.
INT8_DTYPES = {torch.int8: DTYPES[torch.float32]}
# Of copies that the CPU's step writes, by dtype of the parameter.
COPY_DTYPES = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.bfloat16,),
}
CPU = torch.device("cpu")

_EXCHANGE_API = "__dlpack_c_exchange_api__"
"""The attribute of torch's class of tensors by which the op looks at many of them, from 2.10 on."""


@lru_cache(maxsize=1)
def module() -> ModuleType:
    """Return the compiled module, built on first use."""
    return build.load()


def prepare() -> None:
    """Build the op now instead of in the first step; ignores errors, which that step raises."""
    with contextlib.suppress(Exception):
        CpuKernel()


@lru_cache(maxsize=1)  # called at every step
def isas() -> dict[str, int]:
    """Return the instruction sets that this processor can run: name -> number, slowest first."""
    found: dict[str, int] = module().isas()
    return found


def default_isa() -> str:
    """Return the instruction set of steps: ZERO8_ISA of the environment, else the fastest.

    Raises:
        ValueError: if the processor lacks ZERO8_ISA.
    """
    chosen, supported = os.environ.get("ZERO8_ISA"), list(isas())
    if chosen and chosen not in supported:
        raise ValueError(f"ZERO8_ISA: got {chosen!r}, this processor has {supported}")
    return chosen or supported[-1]


def step(
    segments: Sequence[Segment], num_threads: int | None = None, isa: str | None = None
) -> list[int]:
    """Take one optimizer step on every segment, in place, in one parallel region.

    Args:
        segments: pieces of parameters; see `zero8.spec.segment`.
        num_threads: threads to use; `step_threads()` by default.  The result does not depend on it.
        isa: instruction set, one of `isas()`; `default_isa()` by default.

    Returns:
        For each segment the number of blocks left unchanged because a gradient was not finite.

    Raises:
        ValueError: if a tensor has the wrong dtype, device, layout or size, or if the processor
            lacks the instruction set.
    """
    isa = default_isa() if isa is None else isa
    if isa not in isas():
        raise ValueError(f"isa: got {isa!r}, this processor has {list(isas())}")
    records, scalars = packed(segments)
    run(records, scalars, step_threads() if num_threads is None else num_threads, isa)
    counts: list[int] = records["nonfinite_blocks"].tolist()
    return counts


def packed(
    segments: Sequence[Segment], device: torch.device = CPU
) -> tuple[np.ndarray, np.ndarray]:
    """Return the kernel's structs for segments on a device, and for the scalars they refer to.

    Args:
        segments: segments of one algorithm.
        device: the device that their tensors must be on.
    """
    distinct = dict.fromkeys(segment.scalars for segment in segments)
    scalars = {key: number for number, key in enumerate(distinct)}
    algorithm = segments[0].algorithm if segments else ADAM
    return records_of(segments, device, scalars), packed_scalars(algorithm, scalars)


def records_of(
    segments: Sequence[Segment], device: torch.device, scalars: Mapping[Scalars, int]
) -> np.ndarray:
    """Return the kernel's structs for segments on a device.

    Args:
        segments: the segments to describe.
        device: the device that their tensors must be on.
        scalars: the index of each segment's scalars; segments with other scalars get 0.

    Raises:
        ValueError: if a tensor has the wrong dtype, device, layout or size.
    """
    records = np.zeros(len(segments), SEGMENT)
    for record, segment in zip(records, segments, strict=True):
        _fill(record, segment, device)
        record["scalars"] = scalars.get(segment.scalars, 0)
    return records


def packed_scalars(algorithm: Algorithm, scalars: Iterable[Scalars]) -> np.ndarray:
    """Return the kernel's structs for an algorithm's scalars, in order.

    Among the scalars may be those of other algorithms, which its segments do not refer to.
    """
    zeros = (0.0,) * MOST_SCALARS
    structs = [(*one, *zeros[len(tuple(one)) :]) for one in scalars]
    return np.array(structs, np.float32).reshape(-1).view(scalars_dtype(algorithm))


def run(records: np.ndarray, scalars: np.ndarray, num_threads: int, isa: str) -> None:
    """Take one optimizer step on `packed` segments, whose tensors the caller keeps alive."""
    module().step(records, scalars, codec_maps(), alive(num_threads), isas()[isa])


class HostCounts:
    """Blocks that a step on the CPU has left unchanged, with the interface of a GPU's counts."""

    def __init__(self, nonfinite_blocks: np.ndarray):
        """Keep the kernel's counts, (segments,)."""
        self._nonfinite_blocks = nonfinite_blocks

    def have_arrived(self) -> bool:
        """Return True."""
        return True

    def read(self) -> np.ndarray:
        """Return the counts."""
        return self._nonfinite_blocks


class CpuKernel:
    """The kernel of steps on the CPU; its `default_isa` and `host_share` are those of now."""

    def __init__(self) -> None:
        """Build the op if needed.

        Raises:
            ValueError: if this processor lacks ZERO8_ISA, or a launcher's variable is not a number.
        """
        self._step, self._isa = module().step, isas()[default_isa()]
        self._maps = codec_maps()
        self._max_threads = host_share()
        self._team = 0, 0, 0  # process, number of threads, and its result from `alive`

    def step(self, records: np.ndarray, scalars: np.ndarray) -> HostCounts | None:
        """Take one optimizer step on `packed` segments, whose tensors the caller keeps alive.

        Returns:
            The blocks left unchanged; None if there are none.
        """
        process, num_threads = os.getpid(), min(torch.get_num_threads(), self._max_threads)
        if self._team[:2] != (process, num_threads):
            self._team = process, num_threads, alive(num_threads)
        self._step(records, scalars, self._maps, self._team[2], self._isa)
        counts = records["nonfinite_blocks"]
        return HostCounts(counts.copy()) if counts.any() else None


def fill(
    records: np.ndarray,
    kept: np.ndarray,
    addresses: np.ndarray,
    which: np.ndarray,
    steps: np.ndarray,
) -> None:
    """Fill the fields of a step into records: addresses, phases, scalars' indices, counts of 0.

    Phases are those of equation (D1) of `zero8.spec.dither`.

    Args:
        records: (pieces,) `SEGMENT`.
        kept: (pieces,) `KEPT_PIECE`, offset, parameter and dither keys of each piece.
        addresses: (2, parameters) uint64, of parameters and gradients.
        which: (parameters,) int64, indices in `steps`, and in the scalars of the step.
        steps: int64, numbers of steps, from 1.

    Raises:
        ValueError: if an index is out of range.
    """
    module().fill(records, kept, addresses.reshape(-1), which, steps)


def described(objects: list[Tensor | float]) -> np.ndarray:
    """Return address, size, kind and contiguity of tensors, and a hash of small ones' contents.

    Numbers may be among them, as they are in states: separating them would take longer.

    Returns:
        (len(objects),) `TENSOR`.  `kind` is equal for equal dtype and device, its upper 32 bits for
        equal device; it is `WITHOUT_MEMORY` for tensors without memory of their own, such as sparse
        ones.  `contents` is equal for equal contents of int64 tensors in host memory of at most
        `MAX_HASHED` elements, such as a state's `format`; it is 0 for others.  The record of a
        number is contiguous, and otherwise 0.
    """
    records, api = np.empty(len(objects), TENSOR), getattr(Tensor, _EXCHANGE_API, None)
    if api is None or not module().describe(api, Tensor, objects, records):
        for number, one in enumerate(objects):
            records[number] = describe.described(one)
    return records


def addresses_if_same(
    objects: list[Tensor | float], before: np.ndarray, num_addresses: int
) -> np.ndarray | None:
    """Return the addresses of the first objects, as uint64; None if anything else has changed.

    `before` is the earlier result of `described` for these tensors and numbers.  None also if one
    of the first has elements and no memory.  One by one, this would take longer than the step of a
    small parameter: the previous step has evicted the objects from the caches.
    """
    addresses, api = np.empty(num_addresses, np.uint64), getattr(Tensor, _EXCHANGE_API, None)
    is_same = None
    if api is not None:
        is_same = module().describe_again(api, Tensor, objects, before, addresses)
    if is_same is None:
        is_same = describe.is_same(described(objects), before, addresses)
    return addresses if is_same else None


def check(records: np.ndarray, num_scalars: int) -> None:
    """Raise ValueError, which names the field, if packed segments are invalid.

    `run` calls it itself; call it before launching a kernel in another way.

    Args:
        records: (segments,) `SEGMENT`.
        num_scalars: the number of scalars that the segments can refer to.
    """
    module().check(records, num_scalars)


def copy(
    param: Tensor, grad: Tensor, states: Sequence[Tensor], num_threads: int | None = None
) -> None:
    """Make the memory accesses of a step without its arithmetic: a lower bound for its time.

    Reads the gradient, reads and writes back the parameter and the states, all unchanged.

    Args:
        param: contiguous, any shape.
        grad: contiguous, as many bytes as `param`.
        states: contiguous, a whole number of bytes for each element of `param`, or 6 or 4 bits.
        num_threads: threads to use; `step_threads()` by default.

    Raises:
        ValueError: if the numbers of elements differ.
    """
    arrays = [t.detach().view(-1).view(torch.uint8).numpy() for t in (param, grad, *states)]
    threads = step_threads() if num_threads is None else num_threads
    module().copy(arrays[0], arrays[1], arrays[2:], param.numel(), alive(threads))


def _fill(record: np.void, segment: Segment, device: torch.device) -> None:
    def check(name: str, tensor: Tensor | None, numel: int, *dtypes: torch.dtype) -> int:
        return check_buffer(name, tensor, numel, dtypes, device).data_ptr()

    numel, codec = segment.param.numel(), segment.codec
    check_block_size(segment.grid.block_size)
    dtypes_of_grads = DTYPES if segment.row_scales is None else INT8_DTYPES
    record["param"] = check("param", segment.param, numel, *dtypes_of_grads)
    record["grad"] = check("grad", segment.grad, numel, *dtypes_of_grads[segment.param.dtype])
    rules = segment.algorithm.moments
    for place, (rule, moment) in enumerate(zip(rules, segment.moments, strict=True)):
        # A view of one item, through which its fields are set.
        of_moment = record["moments"][place : place + 1]
        if codec is None:
            of_moment["values"] = check(rule.name, moment.values, numel, torch.float32)
        else:
            bits = codec.code_of(rule).bits
            num_bytes = segment.grid.num_bytes(segment.first, numel, bits)
            of_moment["values"] = check(rule.name, moment.values, num_bytes, torch.uint8)
        of_moment["codec"] = FLOAT32_MOMENTS if codec is None else codec.number
        of_moment["phase"] = moment.phase
        if codec is not None:
            num_scales = segment.grid.num_blocks_touched(segment.first, numel)
            num_scales *= math.prod(codec.code_of(rule).scale_shape)
            name = f"{rule.name}_scale"
            of_moment["scales"] = check(name, moment.scales, num_scales, torch.float32)
            of_moment["num_scales"] = num_scales
    if segment.correction is not None:
        check("param with a correction", segment.param, numel, torch.bfloat16)
        record["correction"] = check("correction", segment.correction, numel, torch.int8)
    if segment.weight_sums is not None:
        num_sums = 2 * segment.grid.num_blocks_touched(segment.first, numel)
        sums = check("weight_sums", segment.weight_sums, num_sums, torch.int32)
        record["weight_sums"] = sums
    if segment.copy is not None:
        dtypes = COPY_DTYPES[segment.param.dtype]
        record["copy"] = check("copy", segment.copy, numel, *dtypes)
        record["copy_dtype"] = DTYPE_NUMBERS[segment.copy.dtype]
    if segment.row_scales is not None:
        rows = numel // segment.own_row_length
        record["row_scales"] = check("scales of rows", segment.row_scales, rows, *SCALE_DTYPES)
        record["row_scales_dtype"] = DTYPE_NUMBERS[segment.row_scales.dtype]
    record["numel"], record["first"] = numel, segment.first
    record["row_length"] = segment.grid.row_length
    record["own_row_length"] = segment.own_row_length
    record["block_size"] = segment.grid.block_size
    record["algorithm"] = segment.algorithm.kernel.number
    record["param_dtype"] = DTYPE_NUMBERS[segment.param.dtype]
    record["grad_dtype"] = DTYPE_NUMBERS[segment.grad.dtype]
    record["rounding"], record["param_phase"] = segment.rounding, segment.param_phase
