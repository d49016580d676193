# SPDX-License-Identifier: Apache-2.0
"""The storage of one moment over a segment table."""

import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from zero8.environment.host_memory import advise
from zero8.op import kernel
from zero8.op.kernel import CodedMoment
from zero8.spec.algorithm import MomentRule
from zero8.spec.buffers import check_entry
from zero8.spec.codec import Codec, MomentCode, dequantize, quantize
from zero8.spec.faults import fault, fault_of_values
from zero8.spec.grid import UNITS
from zero8.spec.packing import packed, unpacked
from zero8.spec.segment import Moment
from zero8.state.table import Piece, PieceTable

CHUNK_NUMEL = 1 << 22
"""About how many elements are encoded or decoded at once; on a GPU with 110 bytes each besides."""

HUGE_PAGE_BYTES = 2 * 2**20


@dataclass
class MomentStore:
    """One moment of a shard: codes and scales, and float32 values for pieces without.

    Attributes:
        codec: the codec of the pieces that have one; None if all pieces are float32.
        rule: which moment of an algorithm it is.
        table: the shard's pieces.
        codes: (table.code_offsets(code.bits)[-1],) uint8.
        scales: (blocks touched, *code.scale_shape) float32.
        dense: (elements in float32 pieces,) float32.
        written: whether something other than a step has changed the moment since the last step.
    """

    codec: Codec | None
    rule: MomentRule
    table: PieceTable
    codes: Tensor
    scales: Tensor
    dense: Tensor
    written: bool = False

    @classmethod
    def zeros(
        cls,
        codec: Codec,
        rule: MomentRule,
        table: PieceTable,
        device: torch.device | str = "cpu",
    ) -> "MomentStore":
        """Return a store that decodes to zeros."""
        code = codec.code_of(rule)
        num_bytes = table.code_offsets(code.bits)[-1]
        assert code.bits == 8 or code.zero_code == 0, "places that hold no code are 0"
        return cls(
            codec,
            rule,
            table,
            _filled(code.zero_code, num_bytes, dtype=torch.uint8, device=device),
            _filled(0.0, table.num_blocks, *code.scale_shape, device=device),
            _filled(0.0, table.size(quantized=False), device=device),
        )

    def check(self) -> None:
        """Raise ValueError unless the buffers fit the segment table.

        Call it before a step over a moment from outside: kernels rely on addresses and sizes.
        """
        like = (
            (torch.uint8, (self.num_code_bytes,)),
            (torch.float32, (self.table.num_blocks, *self.code.scale_shape)),
            (torch.float32, (self.table.size(quantized=False),)),
        )
        for (name, buffer), (dtype, shape) in zip(self.named_buffers.items(), like, strict=True):
            check_entry(name, buffer, math.prod(shape), [dtype], is_contiguous=True)
            if tuple(buffer.shape) != shape:
                raise ValueError(f"{name}: got shape {tuple(buffer.shape)}, expected {shape}")
        if len({buffer.device for buffer in self.buffers}) > 1:
            raise ValueError(
                f"{self.name}: got buffers on {[str(b.device) for b in self.buffers]}, expected "
                "one device"
            )

    def check_values(self) -> None:
        """Raise ValueError unless all elements decode to valid numbers for this moment.

        Call it, after `check`, for a moment from outside.
        """
        for number, piece in enumerate(self.table.pieces):
            moment = self.piece(number)
            if moment.scales is None:
                found = fault_of_values(moment.values, is_signed=self.rule.is_signed)
            else:
                blocks = partial(_block_numbers, piece, self.codes.device)
                codes = self.codes_of(number, 0, piece.numel)
                found = fault(self.code, codes, moment.scales, blocks)
            if found:
                raise ValueError(
                    f"{self.name} of {piece.name}: got {found}; the checkpoint is damaged, or its "
                    "run had diverged"
                )

    @property
    def name(self) -> str:
        """The moment's name in states, such as `exp_avg`."""
        return self.rule.name

    @property
    def code(self) -> MomentCode:
        """The code of this moment."""
        assert self.codec is not None, "float32 moments have no code"
        return self.codec.code_of(self.rule)

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and float32 values."""
        return sum(t.nbytes for t in self.buffers)

    @property
    def buffers(self) -> tuple[Tensor, Tensor, Tensor]:
        """Codes, scales and float32 values."""
        return self.codes, self.scales, self.dense

    @property
    def named_buffers(self) -> dict[str, Tensor]:
        """The buffers, by their names in messages."""
        names = ("codes", "scales", "float32 values")
        return {f"{self.name} {n}": t for n, t in zip(names, self.buffers, strict=True)}

    def to(
        self, device: torch.device | str, non_blocking: bool = False, *, copy: bool = False
    ) -> "MomentStore":
        """Return the store on a device; itself if it is there already, unless `copy` is set."""
        # torch decides whether it is there: "cuda" may be "cuda:0".
        moved = self.with_buffers(lambda t: t.to(device, non_blocking=non_blocking, copy=copy))
        return self if moved.codes is self.codes else moved

    def clone(self) -> "MomentStore":
        """Return a store with copies of the buffers."""
        return self.with_buffers(Tensor.clone)

    def with_buffers(self, change: Callable[[Tensor], Tensor]) -> "MomentStore":
        """Return a store with what a function makes of each buffer."""
        codes, scales, dense = map(change, self.buffers)
        return replace(self, codes=codes, scales=scales, dense=dense)

    @property
    def num_code_bytes(self) -> int:
        """The size of `codes`."""
        return 0 if self.codec is None else self.table.code_offsets(self.code.bits)[-1]

    def piece(self, number: int) -> Moment:
        """Return the live codes, as they are stored, and scales, or values, of one piece."""
        table = self.table
        if not table.pieces[number].is_quantized:
            return Moment(self.dense[_range(table.dense_offsets, number)])
        return Moment(
            self.codes[_range(table.code_offsets(self.code.bits), number)],
            self.scales[_range(table.scale_offsets, number)],
        )

    def codes_of(self, number: int, begin: int, end: int) -> Tensor:
        """Return the codes of elements begin to end - 1 of a piece, a byte each; a view or not."""
        piece = self.table.pieces[number]
        stored = self.piece(number).values[self.bytes_of(number, begin, end)]
        return unpacked(stored, piece.grid, piece.first + begin, end - begin, self.code.bits)

    def bytes_of(self, number: int, begin: int, end: int) -> slice:
        """Return which bytes of a piece hold the codes of its elements begin to end - 1."""
        piece, bits = self.table.pieces[number], self.code.bits
        first = piece.first + begin
        units = piece.grid.unit_of(first, bits) - piece.grid.unit_of(piece.first, bits)
        start = units * UNITS[bits].num_bytes
        return slice(start, start + piece.grid.num_bytes(first, end - begin, bits))

    def read(self, start: int, numel: int) -> Tensor:
        """Return elements of the shard as float32, zeros in padding; shape (numel,)."""
        out = torch.zeros(numel, dtype=torch.float32, device=self.codes.device)
        for number, begin, end in self._chunks(start, numel):
            offset = self.table.pieces[number].start
            out[offset + begin - start : offset + end - start] = self._decoded(number, begin, end)
        return out

    def write(self, start: int, values: Tensor) -> None:
        """Write float32 values over elements of the shard; values over padding are ignored.

        A block that is written in part is decoded, changed and encoded again as a whole: its other
        elements move by at most half a code, and not at all if its scale is unchanged.

        A block with a value that its moment cannot have is NaN afterwards: steps leave it as it is,
        and count it.
        """
        self.written = True
        for number, begin, end in self._chunks(start, values.numel()):
            offset = self.table.pieces[number].start
            new = values[offset + begin - start : offset + end - start]
            self._encode(number, begin, new.to(self.codes.device, torch.float32))

    def _chunks(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Yield (piece number, begin, end) in the piece for the parts of a range of the shard.

        A part ends where a block does, so that each block is encoded once, or where the range does.
        """
        for number, *place in self.table.overlapping(start, numel):
            begin, last = (at - self.table.pieces[number].start for at in place)
            while begin < last:
                _, block_end, _, _ = self._blocks(number, begin, min(begin + CHUNK_NUMEL, last))
                end = min(block_end, last)
                yield number, begin, end
                begin = end

    def _blocks(self, number: int, begin: int, end: int) -> tuple[int, int, int, int]:
        """Return (begin, end) widened to whole blocks, and those blocks' (first, count)."""
        piece = self.table.pieces[number]
        grid = piece.grid
        base = grid.block_of(piece.first) if piece.numel else 0
        lowest = grid.block_of(piece.first + begin)
        highest = grid.block_of(piece.first + end - 1)
        wide_begin = max(grid.start_of(lowest) - piece.first, 0)
        wide_end = min(grid.start_of(highest + 1) - piece.first, piece.numel)
        return wide_begin, wide_end, lowest - base, highest - lowest + 1

    def _coded(self, number: int, begin: int, end: int) -> tuple[CodedMoment, int, int]:
        """Return elements of a quantized piece, widened to whole blocks, and which these are."""
        assert self.codec is not None, "float32 moments have no code"
        begin, end, *blocks = self._blocks(number, begin, end)
        piece, moment = self.table.pieces[number], self.piece(number)
        assert moment.scales is not None, "a piece with codes has scales"
        codes, scales = moment.values[self.bytes_of(number, begin, end)], moment.scales
        place = self.codec, piece.grid, piece.first + begin
        return CodedMoment(self.rule, codes, scales.narrow(0, *blocks), *place), begin, end

    def _decoded(self, number: int, begin: int, end: int) -> Tensor:
        if not self.table.pieces[number].is_quantized:
            return self.piece(number).values[begin:end]
        coded, wide_begin, wide_end = self._coded(number, begin, end)
        read = kernel.read_moment if self.codes.device.type == "cpu" else _dequantized
        x = torch.empty(wide_end - wide_begin, device=self.codes.device)
        read(coded, x)
        return x[begin - wide_begin : end - wide_begin]

    def _encode(self, number: int, begin: int, new: Tensor) -> None:
        end = begin + new.numel()
        if not self.table.pieces[number].is_quantized:
            self.piece(number).values[begin:end] = new
            return
        coded, wide_begin, wide_end = self._coded(number, begin, end)
        x = new.contiguous()
        if (wide_begin, wide_end) != (begin, end):
            x = self._decoded(number, wide_begin, wide_end)
            x[begin - wide_begin : end - wide_begin] = new
        write = kernel.write_moment if self.codes.device.type == "cpu" else _quantized
        write(coded, x)


# --- On a GPU, what the kernel does on the CPU ----------------------------------------------------


def _dequantized(coded: CodedMoment, x: Tensor) -> None:
    rule, stored, scales, codec, grid, first = coded
    code, (block, _) = codec.code_of(rule), grid.block_numbers(first, x.numel(), x.device)
    codes = unpacked(stored, grid, first, x.numel(), code.bits)
    x.copy_(dequantize(code, codes, scales, block))


def _quantized(coded: CodedMoment, x: Tensor) -> None:
    rule, stored, scales, codec, grid, first = coded
    code, (block, count) = codec.code_of(rule), grid.block_numbers(first, x.numel(), x.device)
    is_fault = ~x.isfinite() if rule.is_signed else ~(x.isfinite() & (x >= 0))
    faulty = torch.zeros(count, dtype=torch.bool, device=x.device)
    faulty[block[is_fault]] = True
    x = torch.where(faulty[block], 1.0, x)  # anything but 0, of which codes have no scale
    codes, new = quantize(code, x, block, count)
    new[faulty] = torch.nan
    stored.copy_(packed(codes, grid, first, code.bits))
    scales.copy_(new)


def _range(offsets: tuple[int, ...], number: int) -> slice:
    return slice(offsets[number], offsets[number + 1])


def _block_numbers(piece: Piece, device: torch.device, begin: int, end: int) -> Tensor:
    """Return the blocks of elements begin to end - 1 of a piece, counted from its first block."""
    grid, first = piece.grid, piece.first + begin
    block, _ = grid.block_numbers(first, end - begin, device)
    return block + (grid.block_of(first) - grid.block_of(piece.first))


def _filled(
    value: float, *shape: int, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> Tensor:
    # torch fills with the threads, and in the contiguous shares, that a step uses, so that each
    # page is near the processor that will work on it.
    return advise_huge(torch.empty(shape, dtype=dtype, device=device)).fill_(value)


# --- Huge pages ----------------------------------------------------------------------------------


def advise_huge(x: Tensor) -> Tensor:
    """Ask Linux for huge pages under a CPU tensor that nothing has written to, and return it.

    A step streams through states, and pages of 4 KiB slow it down.
    """
    if x.device.type == "cpu" and x.is_contiguous():
        # Whole huge pages only: the memory beside them belongs to other tensors.
        begin = -(-x.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = (x.data_ptr() + x.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        advise(begin, end - begin, mmap.MADV_HUGEPAGE)
    return x
