# SPDX-License-Identifier: Apache-2.0
"""What steps keep of a parameter: its kernel records, and what its tensors were like for them.

Making it takes about 100 microseconds, long compared with the step of a small tensor.  Records hold
addresses, not tensors, so they keep nothing alive but sums of their own.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from zero8.op import kernel
from zero8.op.structs import FLOAT32_MOMENTS, KEPT_PIECE, SEGMENT
from zero8.optimizer import widened
from zero8.optimizer.batch import Row
from zero8.spec import dither
from zero8.spec.algorithm import Algorithm
from zero8.spec.buffers import check_apart, check_entry
from zero8.spec.int8_rows import SCALE_DTYPES
from zero8.state.entries import is_new, others_in
from zero8.state.extent import local
from zero8.state.header import Entries
from zero8.state.kind import Contents, StateKind
from zero8.state.params import ParamInfo
from zero8.state.store import MomentStore
from zero8.state.table import Piece
from zero8.state.weights import int8_rows


class WeightSums:
    """The sums by which steps find corrections that belong to other weights.

    `zero8.spec.corrections` defines them.  They are run-time memory, 8 bytes per block, and no part
    of a state: after a load, and for a correction that other code has put into a state, there are
    none, and all corrections count.
    """

    def __init__(self) -> None:
        """Start without any."""
        self._of: dict[int, tuple[ref[Tensor], Tensor]] = {}  # by the parameter's id

    def of(self, p: Tensor, correction: Tensor, num_blocks: int, device: torch.device) -> Tensor:
        """Return the sums that a parameter's last step has left, (num_blocks, 2) int32.

        They are 0 if it had another correction.
        """
        known = self._of.get(id(p))
        if known is None or known[0]() is not correction or known[1].device != device:
            sums = torch.zeros(num_blocks, 2, dtype=torch.int32, device=device)
            known = self._of[id(p)] = ref(correction), sums
        return known[1]

    def moved(self, p: Tensor, correction: Tensor) -> None:
        """Take the contents of a parameter's last correction for those of this one."""
        if id(p) in self._of:
            self._of[id(p)] = ref(correction), self._of[id(p)][1]

    def forget(self) -> None:
        """Let all corrections count: steps find 0, also where records are kept."""
        for _, sums in self._of.values():
            sums.zero_()


@dataclass(frozen=True, eq=False)
class Entry:
    """What steps keep of one parameter.

    `seen` describes its values, its gradient, and its contents: the records are valid while nothing
    but the first two addresses changes.  csrc/fill.cpp sets the fields that steps change.
    """

    kind: StateKind
    keys: object  # what `contents_of` says of its state besides tensors and numbers
    seen: np.ndarray  # (2 + contents,) `TENSOR`
    is_plain: bool  # whether its contents are the values of its state as they are
    pieces: tuple[Piece, ...]
    records: np.ndarray  # (pieces,) `SEGMENT`
    kept: np.ndarray  # (pieces,) `KEPT_PIECE`, the constants that `fill` needs
    weight_sums: Tensor | None  # those to which the records refer, None without a correction

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of its steps."""
        return self.kind.algorithm

    def is_valid(self, row: Row) -> bool:
        """Return whether a parameter's tensors are those that the records are for."""
        keys, contents = contents_of(self.kind, row.param, row.state)
        objects = [row.value, row.grad, *contents]
        return keys == self.keys and kernel.addresses_if_same(objects, self.seen, 2) is not None

    def has_floats_of(self, before: "Entry") -> bool:
        """Return whether the float32 moments are the tensors that they were before."""
        moments = [one.records["moments"] for one in (self, before)]
        return np.array_equal(*(one["values"][one["codec"] == FLOAT32_MOMENTS] for one in moments))


def contents_of(kind: StateKind, p: Tensor, state: Entries) -> Contents:
    """Return what records depend on besides values and gradient; of INT8 weights also scales."""
    keys, contents = kind.contents(state)
    rows = int8_rows(p)
    return (keys, contents) if rows is None else (keys, [*contents, rows.scales])


def prepared(kind: StateKind, row: Row, info: ParamInfo, weight_sums: WeightSums) -> Entry:
    """Return the entry of one parameter; makes its state if it has none.

    Raises ValueError if its state does not fit it.
    """
    p, values, state = row.param, row.value, row.state
    settings, rows = kind.settings, int8_rows(p)
    if is_new(state):
        state |= kind.new(p, info)
    if settings.corrects(p) and "param_correction" not in state:
        state["param_correction"] = torch.zeros_like(p, dtype=torch.int8, requires_grad=False)
    _make_contiguous(state, others_in(state, settings.algorithm))
    stores = kind.moments(p, state, info)
    _check(row, stores, info)
    if is_widened := rows is not None and widened.is_widened(values.device):
        chunks = widened.in_chunks(stores[0].table)
        stores = [replace(store, table=chunks) for store in stores]
    pieces = stores[0].table.pieces
    if is_widened:
        flat = widened.buffer_of(pieces, values.device)
        params = [flat.narrow(0, 0, one.numel) for one in pieces]
    else:
        flat = values.contiguous().view(-1)
        params = [flat.narrow(0, one.start, one.numel) for one in pieces]
    grads = row.grad.contiguous().view(-1)
    correction, sums = _correction(state), None
    num_blocks = [one.grid.num_blocks_touched(one.first, one.numel) for one in pieces]
    if correction is not None:
        of_blocks = sum(num_blocks), values.device
        sums = weight_sums.of(p, state["param_correction"], *of_blocks)
    of_pieces = [None] * len(pieces) if sums is None else sums.split(num_blocks)
    records = np.zeros(len(pieces), SEGMENT)
    for number, (piece, param) in enumerate(zip(pieces, params, strict=True)):
        whole = piece.start, piece.numel
        kernel.write_record(
            records[number],
            param=param,
            grad=grads.narrow(0, *whole),
            algorithm=settings.algorithm.kernel.number,
            moments=[store.piece(number) for store in stores],
            codec=stores[0].codec if piece.is_quantized else None,
            grid=piece.grid,
            first=piece.first,
            rounding=settings.rounding,
            correction=None if correction is None else correction.view(-1).narrow(0, *whole),
            weight_sums=of_pieces[number],
            row_scales=None
            if rows is None or is_widened
            else widened.rows_of_piece(rows, piece).scales,
        )
    kept = np.zeros(len(records), KEPT_PIECE)
    for name, tensor in (("param", flat), ("grad", grads)):
        kept[f"{name}_offset"] = records[name] - np.uint64(tensor.data_ptr())
    for one, piece in zip(kept, pieces, strict=True):
        of_moments = kind.algorithm.moment_names
        streams = [_stream_key(settings.seed, piece.identity, s) for s in (*of_moments, "param")]
        one["moment_keys"][: len(of_moments)], one["param_key"] = streams[:-1], streams[-1]
    keys, contents = contents_of(kind, p, state)
    seen = kernel.described([values, row.grad, *contents])
    is_plain = rows is None and not kind.wraps_tensors
    return Entry(kind, keys, seen, is_plain, pieces, records, kept, sums)


def _make_contiguous(state: Entries, others: Entries) -> None:
    # The kernel works on the state in place, and needs it contiguous.
    for key, value in state.items():
        if key in others or not isinstance(value, Tensor) or value.layout != torch.strided:
            continue
        if not value.is_contiguous():
            state[key] = value.contiguous()


def _check(row: Row, stores: list[MomentStore], info: ParamInfo) -> None:
    """Raise ValueError unless a state has the parameter's size and no tensors share memory."""
    if stores[0].table.numel != row.value.numel():
        raise ValueError(
            f"{info.label}: got a parameter of {row.value.numel()} elements, its state has "
            f"{stores[0].table.numel}; a parameter that changes its size needs a new optimizer"
        )
    written = {"the parameter": row.value}
    if (rows := int8_rows(row.param)) is not None:
        of_rows = rows.scales, len(rows.codes), SCALE_DTYPES, row.value.device
        written["the scales"] = check_entry("row_scales", *of_rows, is_contiguous=True)
    for store in stores:
        written |= store.named_buffers
    if (correction := _correction(row.state)) is not None:
        of_all = correction, row.value.numel(), [torch.int8]
        check_entry("param_correction", *of_all, is_contiguous=True)
        written["param_correction"] = correction
    for name, tensor in written.items():
        if tensor.device != row.value.device:
            raise ValueError(
                f"{name} of {info.label}: got a tensor on {tensor.device}, expected one on "
                f"{row.value.device}"
            )
    check_apart({f"{name} of {info.label}": t for name, t in written.items()})


def _correction(state: Entries) -> Tensor | None:
    found: Tensor | None = state.get("param_correction")
    return None if found is None else local(found)


@lru_cache(maxsize=1 << 17)
def _stream_key(seed: int, identity: int, stream: str) -> int:
    return dither.stream_key(seed, identity, stream)
