# SPDX-License-Identifier: Apache-2.0
"""Calls the compiled step, on records of segments."""

import logging
import os
from collections.abc import Sequence
from functools import lru_cache
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from zero8.environment.packages import TESTED
from zero8.op import build
from zero8.op.codec_maps import codec_maps
from zero8.op.structs import (
    DTYPE_NUMBERS,
    FLOAT32_MOMENTS,
    MOST_SCALARS,
    SCALARS,
    SEGMENT,
    TENSOR,
)
from zero8.op.threads import alive, host_share
from zero8.spec.algorithm import MomentRule, Scalars
from zero8.spec.arithmetic import SMALLEST_NORMAL
from zero8.spec.codec import Codec
from zero8.spec.grid import BlockGrid
from zero8.spec.segment import Moment, Rounding

# Dtypes of parameters, and for each the dtypes of its gradients.
DTYPES = {
    torch.float32: (torch.float32, torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.float32, torch.bfloat16),
}
# Of copies that the CPU's step writes, by dtype of the parameter.
COPY_DTYPES = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.bfloat16: (torch.bfloat16,),
}

logger = logging.getLogger("zero8")


@lru_cache(maxsize=1)
def module() -> ModuleType:
    """Return the compiled module, built on first use where none is installed."""
    found = build.load()
    if not found.has_threads():
        logger.warning(
            "zero8: steps run in one thread, as torch has loaded no OpenMP runtime that has "
            "GOMP_parallel; packages of torch for Linux from PyPI and conda-forge do"
        )
    return found


@lru_cache(maxsize=1)  # called at every step
def isas() -> dict[str, int]:
    """Return the instruction sets that this processor can run: name -> number, slowest first."""
    return {name: number for name, number in module().isas().items() if number >= 0}


def default_isa() -> str:
    """Return the instruction set of steps: ZERO8_ISA of the environment, else the fastest."""
    chosen, supported = os.environ.get("ZERO8_ISA"), list(isas())
    if chosen and chosen not in supported:
        raise ValueError(f"ZERO8_ISA: got {chosen!r}, this processor has {supported}")
    return chosen or supported[-1]


def write_record(
    record: np.void,
    *,
    param: Tensor,
    grad: Tensor,
    algorithm: int,
    moments: Sequence[Moment],
    codec: Codec | None,
    grid: BlockGrid,
    first: int,
    rounding: Rounding,
    correction: Tensor | None = None,
    weight_sums: Tensor | None = None,
    row_scales: Tensor | None = None,
) -> None:
    """Write the `SEGMENT` of one piece of a parameter, but for scalars, phases and copies.

    The arguments are attributes of `zero8.spec.segment.Segment`, and the number of its algorithm in
    `csrc/algorithms.h`.  Tensors are contiguous, on the kernel's device, and of a size that fits
    `param`.
    """
    record["param"], record["grad"] = param.data_ptr(), grad.data_ptr()
    others = {"correction": correction, "weight_sums": weight_sums, "row_scales": row_scales}
    for name, tensor in others.items():
        record[name] = 0 if tensor is None else tensor.data_ptr()
    for place, moment in zip(record["moments"][: len(moments)], moments, strict=True):
        place["values"] = moment.values.data_ptr()
        place["codec"] = FLOAT32_MOMENTS if codec is None else codec.number
        if moment.scales is not None:
            place["scales"], place["num_scales"] = moment.scales.data_ptr(), moment.scales.numel()
    record["numel"], record["first"] = param.numel(), first
    record["row_length"], record["block_size"] = grid.row_length, grid.block_size
    record["own_row_length"] = grid.code_row_length
    record["algorithm"], record["rounding"] = algorithm, rounding
    record["param_dtype"] = DTYPE_NUMBERS[param.dtype]
    record["grad_dtype"] = DTYPE_NUMBERS[grad.dtype]
    if row_scales is not None:
        record["row_scales_dtype"] = DTYPE_NUMBERS[row_scales.dtype]
        if row_scales.numel():
            record["own_row_length"] = param.numel() // row_scales.numel()


def packed_scalars(scalars: Sequence[Scalars]) -> np.ndarray:
    """Return the kernel's structs for an algorithm's scalars, in order: (scalars,) `SCALARS`.

    Subnormal ones become zeros.  Among the scalars may be those of other algorithms, which its
    segments do not refer to.
    """
    zeros = (0.0,) * MOST_SCALARS
    numbers = np.array([(*one, *zeros[len(tuple(one)) :]) for one in scalars], np.float32)
    tiny = np.abs(numbers) < SMALLEST_NORMAL
    flushed = np.where(tiny, np.copysign(np.float32(0), numbers), numbers)
    return flushed.reshape(-1).view(SCALARS)


class BlockCounts:
    """Numbers of blocks that a step has left unchanged, one for each segment."""

    def __init__(self, counts: np.ndarray, copied: torch.cuda.Event | None = None):
        """Keep the kernel's counts, of a GPU with the event after which they are on the host."""
        self._counts, self._copied = counts, copied

    def have_arrived(self) -> bool:
        """Return whether `read` would return at once."""
        return self._copied is None or bool(self._copied.query())

    def read(self) -> np.ndarray:
        """Return them, (segments,) int64; waits for a GPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._counts


class CpuKernel:
    """The kernel of steps on the CPU; its `default_isa` and `host_share` are those of now."""

    def __init__(self) -> None:
        """Build the op if needed."""
        self._step, self._isa = module().step, isas()[default_isa()]
        self._maps = codec_maps()
        self._max_threads = host_share()
        self._team, self._threads = (0, 0), 0  # process and number of threads, those alive

    def step(self, records: np.ndarray, scalars: np.ndarray) -> BlockCounts | None:
        """Take one optimizer step on records, whose tensors the caller keeps alive.

        Returns the blocks left unchanged, None if there are none.
        """
        team = os.getpid(), min(torch.get_num_threads(), self._max_threads)
        if self._team != team:
            self._team, self._threads = team, alive(team[1])
        self._step(records, scalars, self._maps, self._threads, self._isa)
        counts = records["nonfinite_blocks"]
        return BlockCounts(counts.copy()) if counts.any() else None


class CodedMoment(NamedTuple):
    """Elements of a moment that are whole blocks, or a shard's parts of blocks."""

    rule: MomentRule
    codes: Tensor
    scales: Tensor
    codec: Codec
    grid: BlockGrid
    first: int  # as in `zero8.spec.segment.Segment`


_READ = {True: 5, False: 6}  # numbers in csrc/algorithms.h, by whether the moment is signed
_WRITE = {(True, False): 7, (True, True): 8, (False, True): 9}  # and whether it is dithered


def read_moment(coded: CodedMoment, values: Tensor) -> None:
    """Decode on the CPU as `dequantize` does, into float32 values; NaN if scales are not finite."""
    if coded.scales.data_ptr() % coded.scales.element_size():  # in a mapped file
        coded = coded._replace(scales=coded.scales.clone())
    _convert(coded, values, _READ[coded.rule.is_signed])


def write_moment(coded: CodedMoment, values: Tensor) -> None:
    """Encode float32 values on the CPU as `quantize` does without a step.

    Blocks with a value that the moment cannot have get scales of NaN.
    """
    _convert(coded, values, _WRITE[coded.rule.is_signed, coded.rule.is_dithered])


def _convert(coded: CodedMoment, values: Tensor, number: int) -> None:
    records = np.zeros(1, SEGMENT)
    write_record(
        records[0],
        param=values,
        grad=values,
        algorithm=number,
        moments=[Moment(coded.codes, coded.scales)],
        codec=coded.codec,
        grid=coded.grid,
        first=coded.first,
        rounding=Rounding.NEAREST,
    )
    CpuKernel().step(records, np.zeros(1, SCALARS))


def described(objects: list[Tensor | float]) -> np.ndarray:
    """Return address, size, kind and contiguity of tensors, and a hash of small ones' contents.

    Of a `TENSOR`, `kind` is equal for equal dtype and device, its upper 32 bits for equal device,
    and `WITHOUT_MEMORY` for sparse tensors and the like; `contents` is of int64 tensors in host
    memory of at most `MAX_HASHED` elements, and 0 of others.  Numbers are contiguous and else 0.
    """
    records = np.empty(len(objects), TENSOR)
    api = getattr(Tensor, "__dlpack_c_exchange_api__", None)
    if api is None or not module().describe(api, Tensor, objects, records):
        lowest, beyond = TESTED["torch"]
        raise RuntimeError(
            f"got torch {torch.__version__}, whose DLPack interface zero8 does not know, expected "
            f"one from {lowest} to below {beyond}: pip install 'torch>={lowest},<{beyond}'"
        )
    return records


def addresses_if_same(
    objects: list[Tensor | float], before: np.ndarray, num_addresses: int
) -> np.ndarray | None:
    """Return the addresses of the first objects, as uint64; None if anything else has changed.

    `before` is the earlier result of `described`.  None also if one of the first has elements and
    no memory.  One by one, this would take longer than the step of a small parameter.
    """
    now = described(objects)
    if len(now) != len(before):
        return None
    first = now[:num_addresses]
    addresses = first["data"].copy()
    if ((addresses == 0) & (first["numel"] > 0)).any():  # it has lost its memory
        return None
    first["data"] = before["data"][:num_addresses]
    return addresses if now.tobytes() == before.tobytes() else None


def first_blocks(records: np.ndarray, num_scalars: int) -> np.ndarray:
    """Return the running sums of the records' numbers of blocks, from 0: int64, one more.

    Raises ValueError, which names the field, for records on which no kernel can rely.
    """
    sums = np.zeros(len(records) + 1, np.int64)
    module().check(records, num_scalars, sums)
    return sums
