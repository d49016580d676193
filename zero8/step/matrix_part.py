# SPDX-License-Identifier: Apache-2.0
"""The part of a step whose updates depend on whole matrices: equations (O1) to (O4) of Muon.

The kernel forms the updates of some parameters in a buffer, they are orthogonalized there, and the
kernel applies them.  Matrices that this rank holds whole are orthogonalized here, those of equal
shape together; the others are gathered on one rank each (`zero8.ranks.owners`).
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from zero8.algorithms.muon import MUON, MuonScalars, applying, forming, lr_ratio, matrices_of
from zero8.op import kernel
from zero8.op.structs import DTYPE_NUMBERS, FLOAT32_MOMENTS
from zero8.ranks import numbers
from zero8.ranks.owners import Round, rounds_of
from zero8.spec.newton_schulz import SKIPPED, orthogonalized
from zero8.spec.segment import Rounding
from zero8.step.batch import Batch, Group
from zero8.step.call import Call
from zero8.step.matrices import Places, Unit
from zero8.step.nonfinite import Counts

MAX_NUMEL = 1 << 24
"""The most elements that are orthogonalized together, unless one matrix has more."""

Units = Mapping[int, Unit]
"""Parameters on this rank by their identity."""


class Exchange(NamedTuple):
    """A round in which matrices are gathered.

    Attributes:
        round: the round.
        dtype: that in which all ranks send updates.
        begun: the identities of the parameters whose first matrices are gathered.
        ended: those whose last are.
    """

    round: Round
    dtype: torch.dtype
    begun: Collection[int]
    ended: Collection[int]


def of_matrices(call: Call, batch: Batch, scalars: np.ndarray) -> list[Counts]:
    """Take a step of Muon; all ranks that share the parameters must call it.  See `How`."""
    call.entries[0].kind.before_exchange()
    groups, units = batch.group_of_each, _units(call)
    calls = _Calls(call, groups, call.records, scalars)
    for chunk in _chunks([one for one in units.values() if not one.cut], groups):
        calls.step(chunk)
    cut = {identity: one for identity, one in units.items() if one.cut}
    for exchange in _exchanges(call, batch.params, groups, cut):
        calls.step_together(exchange, cut)
    return calls.counts


def _units(call: Call) -> Units:
    units: dict[int, Unit] = {}
    place = 0
    for owner, one in enumerate(call.entries):
        for piece in one.pieces:
            if piece.numel:
                unit = units.setdefault(piece.identity, Unit([], [], owner))
                unit.pieces.append(piece)
                unit.places.append(place)
            place += 1
    return units


def _exchanges(
    call: Call, params: Sequence[Tensor], groups: Sequence[Group], cut: Units
) -> list[Exchange]:
    """Return the exchanges of the matrices that are cut between ranks.

    The kind keeps them: a plan can be made anew on some ranks only, which must not wait for the
    others then.
    """
    agreed = call.entries[0].kind.agreed
    key = tuple(map(id, params))
    if key not in agreed:
        agreed[key] = _agreed(call, params, groups, cut)
    exchanges: list[Exchange] = agreed[key]
    return exchanges


def _agreed(
    call: Call, params: Sequence[Tensor], groups: Sequence[Group], cut: Units
) -> list[Exchange]:
    """Agree with the other ranks on the exchanges, process group by process group."""
    ranks = [one.kind.process_group(p) for one, p in zip(call.entries, params, strict=True)]
    keys = list(zip(ranks, (group["ns_dtype"] for group in groups), strict=True))
    first_in: dict[int, int] = {}
    for owner, group in enumerate(groups):
        first_in.setdefault(id(group), owner)
    exchanges: list[Exchange] = []
    for those, setting in dict.fromkeys(key for key in keys if key[0] is not None):
        held = {
            (identity, number): unit.held(number, first_in[id(groups[unit.owner])])
            for identity, unit in cut.items()
            for number in unit.cut
            if keys[unit.owner] == (those, setting)
        }
        here = _dtype({"ns_dtype": setting}, call.device)
        # Processors may differ, but all ranks have to send the same dtype.
        (is_float32,) = numbers.largest([int(here is torch.float32)], [those])
        dtype = torch.float32 if is_float32 else torch.bfloat16
        exchanges += _exchanges_of(rounds_of(held, those, MAX_NUMEL), dtype)
    return exchanges


def _exchanges_of(rounds: Sequence[Round], dtype: torch.dtype) -> Iterator[Exchange]:
    """Yield the exchanges of some rounds, which have all matrices of their parameters."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, one in enumerate(rounds):
        for identity in (identity for keys in one.owned for identity, _ in keys):
            first.setdefault(identity, place)
            last[identity] = place
    for place, one in enumerate(rounds):
        begun = [identity for identity, at in first.items() if at == place]
        ended = [identity for identity, at in last.items() if at == place]
        yield Exchange(one, dtype, begun, ended)


class _Calls:
    """The kernel calls of one step.

    Attributes:
        taken: the calls that have applied updates.
        places: the records of each.
    """

    def __init__(
        self,
        part: Call,
        groups: Sequence[Group],
        records: np.ndarray,
        scalars: np.ndarray,
    ):
        """Start without calls.

        Args:
            part: the part.
            groups: the optimizer's group of each of its parameters.
            records: its records, filled for the step.
            scalars: the step's, filled likewise.
        """
        self.counts: list[Counts] = []
        self._kernel, self._device, self._pieces = part.kernel, part.device, part.pieces
        self._groups, self._records = groups, records
        self._group_of = [groups[owner] for owner in part.kept["owner"]]
        self._scalars = [MuonScalars(*row.tolist()) for row in scalars]
        self._updates: dict[int, Tensor] = {}  # of parameters between `_begin` and `_end`

    def step(self, units: Sequence[Unit]) -> None:
        """Take the step of parameters of one shape and group, of which no matrix is cut."""
        places = [place for unit in units for place in unit.places]
        shape, group = units[0].matrix_shape, self._groups[units[0].owner]
        update = self._formed(places, _dtype(group, self._device))
        self._apply(places, _orthogonal(update, shape, group))

    def step_together(self, exchange: Exchange, cut: Units) -> None:
        """Take what a round has of the step of the parameters with matrices that are cut."""
        one, dtype, begun, ended = exchange
        self._begin([cut[identity] for identity in begun if identity in cut], dtype)
        views = [
            view
            for keys in one.owned
            for identity, number in keys
            if identity in cut
            for view in self._views(cut[identity], number)
        ]
        whole = one.gathered(torch.cat([self._nothing(dtype), *views]))
        if one.own is not None:
            whole = _orthogonal(whole, one.own.shape, self._groups[one.own.like])
        _fill(views, one.returned(whole))
        self._end([cut[identity] for identity in ended if identity in cut])

    def _begin(self, units: Sequence[Unit], dtype: torch.dtype) -> None:
        """Form the updates of parameters, and orthogonalize those of their whole matrices."""
        updates = self._formed([place for unit in units for place in unit.places], dtype)
        for unit, update in zip(units, updates.split([one.numel for one in units]), strict=True):
            self._updates[unit.identity] = update
            shape, group = unit.matrix_shape, self._groups[unit.owner]
            count = max(1, MAX_NUMEL // math.prod(shape))
            for start in range(0, len(unit.whole), count):
                numbers_here = unit.whole[start : start + count]
                views = [view for number in numbers_here for view in self._views(unit, number)]
                _fill(views, _orthogonal(torch.cat(views), shape, group))

    def _views(self, unit: Unit, number: int) -> list[Tensor]:
        """Return what there is of the update of a matrix."""
        update = self._updates[unit.identity]
        return [update[run.start : run.start + run.numel] for run in unit.runs.get(number, ())]

    def _end(self, units: Sequence[Unit]) -> None:
        """Apply the updates of parameters, all of whose matrices are orthogonalized."""
        if units:
            updates = [self._updates.pop(unit.identity) for unit in units]
            self._apply([place for unit in units for place in unit.places], torch.cat(updates))

    def _nothing(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(0, dtype=dtype, device=self._device)

    def _formed(self, places: Places, dtype: torch.dtype) -> Tensor:
        """Return u of (O2) for some records, one after the other; moments are stepped.

        It is formed in bfloat16 where parameter and gradient are, and else in float32, because the
        kernel rounds the product of a gradient and the factor of clipping to the wider type of the
        gradient and of what it writes.
        """
        records = self._records[places]
        narrow = DTYPE_NUMBERS[torch.bfloat16]
        is_narrow = (records["param_dtype"] == narrow) & (records["grad_dtype"] == narrow)
        # The kernel multiplies what is there by 0, unless it skips the block.
        updates = [
            torch.full(
                (self._pieces[place].numel,),
                SKIPPED,
                dtype=torch.bfloat16 if here else torch.float32,
                device=self._device,
            )
            for place, here in zip(places, is_narrow.tolist(), strict=True)
        ]
        records["param"] = [update.data_ptr() for update in updates]
        records["param_dtype"] = [DTYPE_NUMBERS[update.dtype] for update in updates]
        records["correction"], records["copy"] = 0, 0
        records["rounding"] = Rounding.NEAREST
        self._kernel.step(records, _packed(map(forming, self._scalars)))
        return torch.cat([self._nothing(dtype), *(update.to(dtype) for update in updates)])

    def _apply(self, places: Places, update: Tensor) -> None:
        """Apply O to the parameters; (O4)."""
        numels = [self._pieces[place].numel for place in places]
        update = update.to(self._device, torch.float32)
        records = self._records[places]
        scalars = []
        for record, place in zip(records, places, strict=True):
            _, rows, columns = matrices_of(self._pieces[place].shape)
            ratio = lr_ratio(self._group_of[place]["adjust_lr_fn"], rows, columns)
            scalars.append(applying(self._scalars[record["scalars"]], ratio))
        records["scalars"] = np.arange(len(records))
        records["grad"] = _addresses(update, numels)
        records["grad_dtype"] = DTYPE_NUMBERS[torch.float32]
        records["moments"] = np.zeros((), records["moments"].dtype)
        # The moment is the gradient itself, which the kernel writes back as it is.
        records["moments"]["values"][:, 0] = records["grad"]
        records["moments"]["codec"][:, 0] = FLOAT32_MOMENTS
        if (counts := self._kernel.step(records, _packed(scalars))) is not None:
            self.counts.append(([self._pieces[place].name for place in places], counts))


def _chunks(units: Sequence[Unit], groups: Sequence[Group]) -> Iterator[list[Unit]]:
    """Yield units of equal shape and group, up to `MAX_NUMEL` elements together."""
    alike: dict[tuple[tuple[int, ...], int], list[Unit]] = {}
    for unit in units:
        alike.setdefault((unit.shape, id(groups[unit.owner])), []).append(unit)
    for (shape, _), those in alike.items():
        count = max(1, MAX_NUMEL // math.prod(shape))
        for start in range(0, len(those), count):
            yield those[start : start + count]


def _fill(views: Sequence[Tensor], x: Tensor) -> None:
    """Copy elements that lie one after the other to some views."""
    for view, part in zip(views, x.split([view.numel() for view in views]), strict=True):
        view.copy_(part)


def _orthogonal(update: Tensor, shape: tuple[int, int], group: Group) -> Tensor:
    """Return O of matrices of a shape, one after the other, where they were computed."""
    x = update.view(-1, *shape).to(_computes_on(update.device))
    settings = group["ns_coefficients"], group["ns_steps"], group["ns_eps"]
    return orthogonalized(x, *settings).reshape(-1)


def _computes_on(device: torch.device) -> torch.device:
    """Return where matrices on a device are orthogonalized: on the accelerator if there is one."""
    if device.type != "cpu" or not torch.accelerator.is_available():
        return device
    return torch.accelerator.current_accelerator(check_available=True) or device


def _dtype(group: Group, device: torch.device) -> torch.dtype:
    """Return the dtype in which updates on a device are formed and orthogonalized."""
    if group["ns_dtype"] != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[group["ns_dtype"]]
    if _computes_on(device).type != "cpu":
        return torch.bfloat16
    fast = torch.cpu.get_capabilities()
    return torch.bfloat16 if fast.get("avx512_bf16") or fast.get("amx_bf16") else torch.float32


def _addresses(x: Tensor, numels: Sequence[int]) -> np.ndarray:
    """Return the addresses of parts of a tensor that lie one after the other."""
    starts = np.cumsum([0, *numels[:-1]]) * x.element_size()
    return np.uint64(x.data_ptr()) + starts.astype(np.uint64)


def _packed(scalars: Iterable[MuonScalars]) -> np.ndarray:
    return kernel.packed_scalars(MUON, scalars)
