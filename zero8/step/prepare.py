# SPDX-License-Identifier: Apache-2.0
"""Prepares a parameter for its steps: makes or checks its state, and makes its kernel records."""

from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from zero8.op.describe import Snapshot
from zero8.spec import dither
from zero8.spec.algorithm import Algorithm, Scalars
from zero8.spec.buffers import check_apart, check_buffer
from zero8.spec.segment import Segment
from zero8.state.entries import is_new, others_in
from zero8.state.extent import local
from zero8.state.header import Entries
from zero8.state.kind import StateKind
from zero8.state.params import ParamInfo
from zero8.state.settings import Settings
from zero8.state.store import MomentStore
from zero8.state.weights import int8_rows
from zero8.step import int8_part
from zero8.step.batch import Batch
from zero8.step.plan import Kinds
from zero8.step.records import ParamRecords
from zero8.step.weight_sums import WeightSums


def prepared(
    kind: StateKind, single: Batch, info: ParamInfo, weight_sums: WeightSums
) -> ParamRecords:
    """Return the records of one parameter; makes its state if it has none.

    Raises:
        ValueError: if its state does not fit it.
    """
    (p,), (values,), (grad,), (state,) = single.params, single.values, single.grads, single.states
    settings = kind.settings
    if is_new(state):
        state |= kind.new(p, info)
    if settings.corrects(p) and "param_correction" not in state:
        state["param_correction"] = torch.zeros_like(p, dtype=torch.int8, requires_grad=False)
    _make_contiguous(state, others_in(state, settings.algorithm))
    stores = kind.moments(p, state, info)
    tensors = {"the parameter": values}
    if (rows := int8_rows(p)) is not None:
        tensors["the scales"] = rows.scales
    _check(tensors, stores, state, info)
    if is_widened := rows is not None and int8_part.is_widened(values.device):
        chunks = int8_part.in_chunks(stores[0].table)
        stores = [replace(store, table=chunks) for store in stores]
    pieces = stores[0].table.pieces
    if is_widened:
        flat = int8_part.buffer_of(pieces, values.device)
        params = [flat.narrow(0, 0, one.numel) for one in pieces]
    else:
        flat = values.contiguous().view(-1)
        params = [flat.narrow(0, one.start, one.numel) for one in pieces]
    grads = grad.contiguous().view(-1)
    segments = [
        _segment(settings, number, stores, state, one, grads) for number, one in enumerate(params)
    ]
    if rows is not None and not is_widened:
        for segment, piece in zip(segments, pieces, strict=True):
            segment.row_scales = int8_part.rows_of_piece(rows, piece).scales
    sums = None
    if (correction := state.get("param_correction")) is not None:
        num_blocks = [one.grid.num_blocks_touched(one.first, one.numel) for one in pieces]
        sums = weight_sums.of(p, correction, sum(num_blocks), values.device)
        for segment, own in zip(segments, sums.split(num_blocks), strict=True):
            segment.weight_sums = own
    keys = [_stream_keys(settings, piece.identity) for piece in pieces]
    snapshot = Snapshot(single.values, single.grads, Kinds([kind]).contents(single))
    return ParamRecords.of(kind, snapshot, pieces, (flat, grads), segments, keys, sums)


def _make_contiguous(state: Entries, others: Entries) -> None:
    # The kernel works on the state in place, and needs it contiguous.
    for key, value in state.items():
        if key in others or not isinstance(value, Tensor) or value.layout != torch.strided:
            continue
        if not value.is_contiguous():
            state[key] = value.contiguous()


def _check(
    tensors: dict[str, Tensor], stores: list[MomentStore], state: Entries, info: ParamInfo
) -> None:
    """Raise ValueError unless a state has the parameter's size and no tensors share memory.

    Args:
        tensors: those of the parameter by name, its values first.
        stores: its moments.
        state: its state.
        info: its description.
    """
    values, *_ = tensors.values()
    if stores[0].table.numel != values.numel():
        raise ValueError(
            f"{info.label}: got a parameter of {values.numel()} elements, its state has "
            f"{stores[0].table.numel}; a parameter that changes its size needs a new optimizer"
        )
    written = dict(tensors)
    for store in stores:
        written |= store.named_buffers
    if (correction := _correction(state)) is not None:
        check_buffer("param_correction", correction, values.numel(), [torch.int8])
        written["param_correction"] = correction
    check_apart({f"{name} of {info.label}": t for name, t in written.items()})


def _correction(state: Entries) -> Tensor | None:
    found: Tensor | None = state.get("param_correction")
    return None if found is None else local(found)


def _segment(
    settings: Settings,
    number: int,
    stores: list[MomentStore],
    state: Entries,
    param: Tensor,
    grad: Tensor,
) -> Segment:
    piece = stores[0].table.pieces[number]
    algorithm = settings.algorithm
    correction = _correction(state)
    if correction is not None:
        correction = correction.view(-1).narrow(0, piece.start, piece.numel)
    return Segment(
        param=param,
        grad=grad.narrow(0, piece.start, piece.numel),
        algorithm=algorithm,
        moments=[store.piece(number) for store in stores],
        codec=stores[0].codec if piece.is_quantized else None,
        grid=piece.grid,
        first=piece.first,
        scalars=_zero_scalars(algorithm),  # each step fills its scalars and phases into the records
        param_phase=0,
        rounding=settings.rounding,
        correction=correction,
    )


@lru_cache
def _zero_scalars(algorithm: Algorithm) -> Scalars:
    scalars: Scalars = algorithm.scalars_type._make(0.0 for _ in algorithm.scalars_type._fields)
    return scalars


def _stream_keys(settings: Settings, identity: int) -> tuple[list[int], int]:
    """Return the dither keys of each moment, and that of the parameter."""
    streams = settings.algorithm.moment_names
    keys = [_stream_key(settings.seed, identity, stream) for stream in streams]
    return keys, _stream_key(settings.seed, identity, "param")


@lru_cache(maxsize=1 << 17)
def _stream_key(seed: int, identity: int, stream: str) -> int:
    return dither.stream_key(seed, identity, stream)
