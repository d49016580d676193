# SPDX-License-Identifier: Apache-2.0
"""The part of a step whose updates depend on whole matrices: equations (O1) to (O4) of Muon.

The kernel forms the updates of some matrices in a buffer, they are orthogonalized there, and the
kernel applies them.  Parameters that this rank holds whole take their steps here, those of equal
shape together; the others are gathered on one rank each (`zero8.ranks.owners`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from zero8.algorithms.muon import (
    MUON,
    MuonScalars,
    applying,
    forming,
    lr_ratio,
    matrices_of,
    multiplications,
)
from zero8.op import kernel
from zero8.op.devices import BlockCounts, Taken
from zero8.op.structs import DTYPE_NUMBERS, FLOAT32_MOMENTS
from zero8.ranks import numbers
from zero8.ranks.owners import Held, Round, rounds_of
from zero8.spec.newton_schulz import SKIPPED, orthogonalized
from zero8.spec.segment import Rounding
from zero8.state.table import Piece
from zero8.step.batch import Batch, Group
from zero8.step.part import Part

MAX_NUMEL = 1 << 24
"""The most elements that are orthogonalized together, unless one parameter has more."""

Places = list[int]
"""Numbers of records of a part."""


@dataclass(frozen=True)
class StepInParts:
    """A step that several kernel calls have taken, each some of the records.

    Attributes:
        taken: the calls.
        places: the records of each.
        num_records: the number of all records.
    """

    taken: Sequence[Taken]
    places: Sequence[Places]
    num_records: int

    def counts(self) -> "CountsInParts | None":
        """Return the blocks left unchanged, None if it is known that there are none."""
        parts = [(at, t.counts()) for at, t in zip(self.places, self.taken, strict=True)]
        known = [(at, counts) for at, counts in parts if counts is not None]
        return CountsInParts(known, self.num_records) if known else None


@dataclass(frozen=True)
class CountsInParts:
    """The counts of several kernel calls, in the order of the part's records.

    Attributes:
        parts: the records of each call, and its counts.
        num_records: the number of all records.
    """

    parts: Sequence[tuple[Places, BlockCounts]]
    num_records: int

    def have_arrived(self) -> bool:
        """Return whether all counts have."""
        return all(counts.have_arrived() for _, counts in self.parts)

    def read(self) -> np.ndarray:
        """Return the counts of all records."""
        read = np.zeros(self.num_records, np.int64)
        for places, counts in self.parts:
            read[places] = counts.read()
        return read


@dataclass(frozen=True)
class Unit:
    """The elements of one parameter on this rank.

    Attributes:
        pieces: the pieces; at least one.
        places: their records.
        owner: the index in the batch of the parameter that has them.
    """

    pieces: list[Piece]
    places: Places
    owner: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's shape."""
        return self.pieces[0].shape

    @cached_property
    def is_whole(self) -> bool:
        """Whether this rank has all elements."""
        return sum(piece.numel for piece in self.pieces) == math.prod(self.shape)

    @property
    def held(self) -> Held:
        """What other ranks need to know."""
        ranges = tuple((piece.first, piece.numel) for piece in self.pieces)
        return Held(self.shape, self.owner, float(multiplications(self.shape)), ranges)


class Exchange(NamedTuple):
    """A round in which parameters are gathered, and the dtype in which all ranks send them."""

    round: Round
    dtype: torch.dtype


class MatrixPart(Part):
    """The parameters of one device whose algorithm is Muon."""

    def _take(self, mine: Batch, records: np.ndarray, scalars: np.ndarray) -> StepInParts:
        """See `Part`; all ranks that share the parameters must call it."""
        units = self._units
        calls = _Calls(self, mine.groups, records, scalars)
        for chunk in _chunks([one for one in units.values() if one.is_whole], mine.groups):
            calls.step(chunk)
        for exchange in self._exchanges(mine, units):
            calls.step_together(exchange, units)
        return StepInParts(calls.taken, calls.places, len(records))

    @cached_property
    def _units(self) -> dict[int, Unit]:
        """Return the parameters on this rank by their identity."""
        units: dict[int, Unit] = {}
        place = 0
        for owner, one in enumerate(self.owners):
            for piece in one.pieces:
                if piece.numel:
                    unit = units.setdefault(piece.identity, Unit([], [], owner))
                    unit.pieces.append(piece)
                    unit.places.append(place)
                place += 1
        return units

    def _exchanges(self, mine: Batch, units: Mapping[int, Unit]) -> list[Exchange]:
        """Return the exchanges of the parameters that are cut between ranks.

        The kind keeps them: a plan can be made anew on some ranks only, which must not wait for the
        others then.
        """
        agreed = self.owners[0].kind.agreed
        key = tuple(map(id, mine.params))
        if key not in agreed:
            agreed[key] = self._agreed(mine, units)
        exchanges: list[Exchange] = agreed[key]
        return exchanges

    def _agreed(self, mine: Batch, units: Mapping[int, Unit]) -> list[Exchange]:
        """Agree with the other ranks on the exchanges, process group by process group."""
        groups = [
            one.kind.process_group(p) for one, p in zip(self.owners, mine.params, strict=True)
        ]
        settings = [group["ns_dtype"] for group in mine.groups]
        keys = list(zip(groups, settings, strict=True))
        exchanges = []
        for group, setting in dict.fromkeys(key for key in keys if key[0] is not None):
            held = {
                identity: unit.held
                for identity, unit in units.items()
                if keys[unit.owner] == (group, setting) and not unit.is_whole
            }
            here = _dtype({"ns_dtype": setting}, self.device)
            # Processors may differ, but all ranks have to send the same dtype.
            (is_float32,) = numbers.largest([int(here is torch.float32)], [group])
            dtype = torch.float32 if is_float32 else torch.bfloat16
            exchanges += [Exchange(one, dtype) for one in rounds_of(held, group)]
        return exchanges


class _Calls:
    """The kernel calls of one step.

    Attributes:
        taken: the calls that have applied updates.
        places: the records of each.
    """

    def __init__(
        self,
        part: Part,
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
        self.taken: list[Taken] = []
        self.places: list[Places] = []
        self._kernel, self._device, self._pieces = part.kernel, part.device, part.pieces
        self._groups, self._records = groups, records
        self._group_of = [groups[owner] for owner in part.kept["owner"]]
        self._scalars = [MuonScalars(*row.tolist()) for row in scalars]

    def step(self, units: Sequence[Unit]) -> None:
        """Take the step of parameters of one shape that this rank has whole."""
        places = [place for unit in units for place in unit.places]
        shape, group = units[0].shape, self._groups[units[0].owner]
        update = self._formed(places, _dtype(group, self._device))
        self._apply(places, _orthogonal(update, shape, group))

    def step_together(self, exchange: Exchange, units: Mapping[int, Unit]) -> None:
        """Take the step of the parameters that are gathered in a round."""
        one, dtype = exchange
        here = [units[owned] for owned in one.owned if owned is not None and owned in units]
        places = [place for unit in here for place in unit.places]
        whole = one.gathered(self._formed(places, dtype))
        if one.own is not None:
            whole = _orthogonal(whole, one.own.shape, self._groups[one.own.owner])
        self._apply(places, one.returned(whole))

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
        nothing = torch.empty(0, dtype=dtype, device=self._device)
        return torch.cat([nothing, *(update.to(dtype) for update in updates)])

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
        self.taken.append(self._kernel.step(records, _packed(scalars)))
        self.places.append(places)


def _chunks(units: Sequence[Unit], groups: Sequence[Group]) -> Iterator[list[Unit]]:
    """Yield units of equal shape and group, up to `MAX_NUMEL` elements together."""
    alike: dict[tuple[tuple[int, ...], int], list[Unit]] = {}
    for unit in units:
        alike.setdefault((unit.shape, id(groups[unit.owner])), []).append(unit)
    for (shape, _), those in alike.items():
        count = max(1, MAX_NUMEL // math.prod(shape))
        for start in range(0, len(those), count):
            yield those[start : start + count]


def _orthogonal(update: Tensor, shape: tuple[int, ...], group: Group) -> Tensor:
    """Return O of parameters of a shape, one after the other, where they were computed."""
    _, rows, columns = matrices_of(shape)
    x = update.view(-1, rows, columns).to(_computes_on(update.device))
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
