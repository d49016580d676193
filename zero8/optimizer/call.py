# SPDX-License-Identifier: Apache-2.0
"""A call: parameters of one device and algorithm that step together; kept between steps."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from zero8.op import kernel
from zero8.op.cuda import Kernel
from zero8.op.structs import DTYPE_NUMBERS
from zero8.optimizer import widened
from zero8.optimizer.batch import Batch
from zero8.optimizer.entry import Entry
from zero8.optimizer.nonfinite import Counts
from zero8.spec.algorithm import Algorithm
from zero8.spec.buffers import check_entry
from zero8.spec.int8_rows import decoded
from zero8.state.header import Entries
from zero8.state.table import Piece
from zero8.state.weights import Int8Rows, class_in_torchao, rows_of


class NextStep(NamedTuple):
    """The step that parameters with equal settings and counters take.

    Its `entries` are those of their states after it: its number, from 1, and the remembered
    numbers.
    """

    number: int
    entries: Entries
    scalars: tuple[float, ...]


How = Callable[["Call", Batch, np.ndarray], list[Counts]]
"""Takes the step of a call over contiguous parameters; its records and these scalars are filled."""


def in_one(call: "Call", batch: Batch, scalars: np.ndarray) -> list[Counts]:
    """Take a step by one call of the kernel; see `How`."""
    counts = call.kernel.step(call.records, scalars)
    return [] if counts is None else [(call.labels, counts)]


def in_float32(call: "Call", batch: Batch, scalars: np.ndarray) -> list[Counts]:
    """Take the step of INT8 weights by `zero8.optimizer.widened`, piece by piece; see `How`."""
    found: list[Counts] = []
    buffer = widened.buffer_of(call.pieces, call.device)
    call.records["param"] = buffer.data_ptr()
    call.records["param_dtype"] = DTYPE_NUMBERS[torch.float32]
    for place, (piece, owner) in enumerate(zip(call.pieces, call.kept["owner"], strict=True)):
        codes = batch.values[owner]  # perhaps a copy of the parameter's
        rows = widened.rows_of_piece(Int8Rows(codes, rows_of(batch.params[owner]).scales), piece)
        weights = buffer[: piece.numel].view(rows.codes.shape)
        decoded(*rows, out=weights)
        if (counts := call.kernel.step(call.records[place : place + 1], scalars)) is not None:
            found.append(((piece.name,), counts))
        widened.store(rows, weights, call.records[place], piece.first)
    return found


@dataclass(eq=False)
class Call:
    """Parameters that step together."""

    algorithm: Algorithm
    entries: list[Entry]
    places: list[int]  # in the batch
    is_all: bool  # whether these are all parameters of the batch
    is_in_order: bool  # whether parameters and gradients are contiguous; else copies are stepped
    device: torch.device
    kernel: Kernel
    how: How
    records: np.ndarray  # (pieces,) `SEGMENT`
    kept: np.ndarray  # (pieces,) `KEPT_PIECE`
    has_copies: bool = False  # whether the records name copies (`Stepper.copies`)

    @cached_property
    def pieces(self) -> list[Piece]:
        """The piece of each record."""
        return list(chain.from_iterable(one.pieces for one in self.entries))

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The label of the parameter of each record."""
        return tuple(piece.name for piece in self.pieces)

    def take(
        self,
        batch: Batch,
        addresses: np.ndarray,
        steps: Sequence[NextStep],
        which: np.ndarray,
        copies: MutableMapping[Tensor, Tensor],
    ) -> list[Counts]:
        """Take the step of these parameters of a batch, and note it in their states.

        `addresses` are those of the batch; `steps` are the distinct steps of its parameters, of
        which `which`, (parameters,) int64, says which is whose.
        """
        if not self.is_all:
            batch, addresses = batch.at(self.places), addresses[:, self.places]
            which = which[self.places]
        # Autograd does not see the kernel's writes.
        torch.autograd.graph.increment_version(_written_by_steps(batch))
        if self.is_in_order:
            mine, written = batch, self._set_copies(batch.params, copies)
        else:
            mine, written = batch.in_order(), []
            addresses = mine.addresses()
        numbers, scalars = np.array([one.number for one in steps]), [one.scalars for one in steps]
        kernel.module().fill(self.records, self.kept, addresses.reshape(-1), which, numbers)
        counts = self.how(self, mine, kernel.packed_scalars(scalars))
        if mine is not batch:
            for values, ours in zip(batch.values, mine.values, strict=True):
                if values is not ours:
                    values.copy_(ours)
        for p in written:
            del copies[p]
        if len(steps) == 1:  # as most often
            for key, value in steps[0].entries.items():  # half the time of `update`
                for state in batch.states:
                    state[key] = value
        else:
            for state, step in zip(batch.states, which.tolist(), strict=True):
                state.update(steps[step].entries)
        return counts

    def _set_copies(self, params: list[Tensor], copies: Mapping[Tensor, Tensor]) -> list[Tensor]:
        """Set the copies that the step writes, and return the parameters that have some."""
        if self.device.type != "cpu" or not (copies or self.has_copies):
            return []
        addresses, dtypes = np.zeros(len(params), np.uint64), np.zeros(len(params), np.int32)
        for place, p in enumerate(params):
            if (copy := copies.get(p)) is not None:
                dtypes_here = kernel.COPY_DTYPES[p.dtype]
                check_entry("copy", copy, p.numel(), dtypes_here, self.device, is_contiguous=True)
                addresses[place], dtypes[place] = copy.data_ptr(), DTYPE_NUMBERS[copy.dtype]
        owner, records = self.kept["owner"], self.records
        is_float32 = records["param_dtype"] == DTYPE_NUMBERS[torch.float32]
        # Copies have 2 bytes per element.
        offsets = self.kept["param_offset"] // np.where(is_float32, 2, 1).astype(np.uint64)
        has_copy = addresses[owner] != 0
        records["copy"] = np.where(has_copy, addresses[owner] + offsets, 0)
        records["copy_dtype"] = np.where(has_copy, dtypes[owner], 0)
        written = [params[place] for place in np.unique(owner[has_copy]).tolist()]
        self.has_copies = bool(written)
        return written


def _written_by_steps(batch: Batch) -> list[Tensor]:
    """Return the tensors whose values a step writes; torchao's have versions of their own."""
    if batch.values is batch.params:
        return batch.values
    pairs = zip(batch.params, batch.values, strict=True)
    return [*batch.values, *(p for p, value in pairs if p is not value and class_in_torchao(p))]
