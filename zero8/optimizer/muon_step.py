# SPDX-License-Identifier: Apache-2.0
"""Steps of Muon, whose updates depend on whole matrices: equations (O1) to (O4).

The kernel forms the updates of some parameters in a buffer, they are orthogonalized there, and the
kernel applies them.  Matrices that this rank holds whole are orthogonalized here, those of equal
shape together; the others are gathered on one rank each (`zero8.optimizer.owners`).  Parameters
step in groups of one shape, so that few updates are in memory at a time.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from zero8.environment import numbers
from zero8.op import kernel
from zero8.op.structs import DTYPE_NUMBERS, FLOAT32_MOMENTS
from zero8.optimizer.batch import Batch, Group
from zero8.optimizer.call import Call
from zero8.optimizer.nonfinite import Counts
from zero8.optimizer.owners import Held, Round, fill, rounds_of
from zero8.spec.muon import (
    MuonScalars,
    applying,
    forming,
    lr_ratio,
    matrices_of,
    ranges_by_matrix,
)
from zero8.spec.newton_schulz import SKIPPED, orthogonalized
from zero8.spec.segment import Rounding
from zero8.state.table import Piece

MAX_NUMEL = 1 << 24
"""The most elements that are orthogonalized together, unless one matrix has more."""


@dataclass(frozen=True)
class Unit:
    """The elements of one parameter on this rank, piece after piece, in the records at `places`.

    `owner` is the index in the batch of the parameter that has them.
    """

    owner: int
    pieces: list[Piece] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's shape."""
        return self.pieces[0].shape

    @property
    def numel(self) -> int:
        """The number of elements on this rank."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """The rows and columns of a matrix."""
        return matrices_of(self.shape)[1:]

    @cached_property
    def runs(self) -> dict[int, list[tuple[int, int, int]]]:
        """What this rank has of each matrix: (first in the unit, first in the matrix, numel)."""
        runs: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        start = 0
        for piece in self.pieces:
            for number, first, numel in ranges_by_matrix(self.shape, piece.first, piece.numel):
                runs[number].append((start, first, numel))
                start += numel
        return dict(runs)

    @cached_property
    def cut(self) -> set[int]:
        """The numbers of the matrices that other ranks have elements of, too."""
        size = math.prod(self.matrix_shape)
        return {one for one, runs in self.runs.items() if sum(run[2] for run in runs) < size}

    def held(self, like: int) -> Held:
        """Return what other ranks need to know of the matrices that are cut; see `Held`."""
        ranges = {n: tuple((first, numel) for _, first, numel in self.runs[n]) for n in self.cut}
        return Held(self.shape, like, ranges)

    def views(self, update: Tensor, number: int) -> list[Tensor]:
        """Return what there is of a matrix in an update of all elements."""
        return [update[start : start + numel] for start, _, numel in self.runs.get(number, ())]


Units = Mapping[int, Unit]
"""Parameters on this rank by their identity."""

Exchange = tuple[list[int], list[Round], torch.dtype]
"""Parameters that step together, the rounds that gather their matrices, and the dtype of these."""


def of_matrices(call: Call, batch: Batch, scalars: np.ndarray) -> list[Counts]:
    """Take a step of Muon; all ranks that share the parameters must call it.  See `How`."""
    units, step = _units_of(call), _Step(call, batch, scalars)
    for alike in _alike({at: unit for at, unit in units.items() if not unit.cut}, step.groups):
        step.take(alike)
    cut = {identity: unit for identity, unit in units.items() if unit.cut}
    for identities, rounds, dtype in step.exchanges(cut):
        step.take({one: cut[one] for one in identities if one in cut}, rounds, dtype)
    return step.counts


def _units_of(call: Call) -> Units:
    units: dict[int, Unit] = {}
    for place, (piece, owner) in enumerate(zip(call.pieces, call.kept["owner"], strict=True)):
        if piece.numel:
            unit = units.setdefault(piece.identity, Unit(int(owner)))
            unit.pieces.append(piece)
            unit.places.append(place)
    return units


def _alike(units: Units, groups: Sequence[Group]) -> Iterator[Units]:
    """Yield units of equal shape and group, up to `MAX_NUMEL` elements together."""
    alike: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for identity, unit in units.items():
        alike.setdefault((unit.shape, id(groups[unit.owner])), []).append(identity)
    for (shape, _), those in alike.items():
        count = max(1, MAX_NUMEL // math.prod(shape))
        for start in range(0, len(those), count):
            yield {identity: units[identity] for identity in those[start : start + count]}


class _Step:
    """The kernel calls of one step; `counts` are those of the calls that have applied updates."""

    def __init__(self, call: Call, batch: Batch, scalars: np.ndarray):
        self.groups, self.counts = batch.group_of_each, list[Counts]()
        self._call, self._params, self._device = call, batch.params, call.device
        count = len(MuonScalars._fields)
        self._scalars = [MuonScalars(*row[:count].tolist()) for row in scalars["numbers"]]

    def take(
        self, units: Units, rounds: Sequence[Round] = (), dtype: torch.dtype | None = None
    ) -> None:
        """Step parameters of one shape and group; `rounds` gather the matrices that are cut.

        This rank may have none of them, and takes part in the rounds nevertheless.
        """
        group = self.groups[next(iter(units.values())).owner] if units else {}
        dtype = dtype or _dtype(group["ns_dtype"], self._device)
        formed = self._formed(list(units.values()), dtype)
        updates = dict(zip(units, formed.split([one.numel for one in units.values()]), strict=True))

        def views_of(keys: Iterable[tuple[int, int]]) -> list[Tensor]:
            here = [(identity, number) for identity, number in keys if identity in units]
            return [view for one, n in here for view in units[one].views(updates[one], n)]

        def orthogonal(matrices: Tensor) -> Tensor:
            return _orthogonal(matrices, next(iter(units.values())).matrix_shape, group)

        whole = [(at, n) for at, unit in units.items() for n in unit.runs if n not in unit.cut]
        while whole:
            count = max(1, MAX_NUMEL // math.prod(units[whole[0][0]].matrix_shape))
            views, whole = views_of(whole[:count]), whole[count:]
            fill(views, orthogonal(torch.cat(views)))
        for one in rounds:
            views = views_of(key for keys in one.owned for key in keys)
            one.replace([formed[:0], *views], orthogonal)
        if units:
            self._apply(list(units.values()), formed)

    def exchanges(self, units: Units) -> list[Exchange]:
        """Return how parameters with matrices that are cut step, as all ranks have agreed.

        The kind keeps it: a plan can be made anew on some ranks only, which must not wait for the
        others then.
        """
        agreed = self._call.entries[0].kind.agreed
        key = tuple(map(id, self._params))
        if key not in agreed:
            agreed[key] = self._agreed(units)
        exchanges: list[Exchange] = agreed[key]
        return exchanges

    def _agreed(self, units: Units) -> list[Exchange]:
        """Agree with the other ranks, process group by process group."""
        pairs = zip(self._call.entries, self._params, self.groups, strict=True)
        keys = [(one.kind.process_group(p), group["ns_dtype"]) for one, p, group in pairs]
        first_in: dict[int, int] = {}
        for owner, group in enumerate(self.groups):
            first_in.setdefault(id(group), owner)
        exchanges: list[Exchange] = []
        for ranks, setting in dict.fromkeys(key for key in keys if key[0] is not None):
            held = {
                identity: unit.held(first_in[id(self.groups[unit.owner])])
                for identity, unit in units.items()
                if keys[unit.owner] == (ranks, setting)
            }
            # Processors may differ, but all ranks have to send the same dtype.
            here = int(_dtype(setting, self._device) is torch.float32)
            (is_float32,) = numbers.largest([here], [ranks])
            dtype = torch.float32 if is_float32 else torch.bfloat16
            exchanges += [(*one, dtype) for one in rounds_of(held, ranks, MAX_NUMEL)]
        return exchanges

    def _formed(self, units: Sequence[Unit], dtype: torch.dtype) -> Tensor:
        """Return u of (O2) for some parameters, one after the other; moments are stepped.

        It is formed in bfloat16 where parameter and gradient are, and else in float32, because the
        kernel rounds the product of a gradient and the factor of clipping to the wider type of the
        gradient and of what it writes.
        """
        records = self._call.records[[place for unit in units for place in unit.places]]
        narrow = DTYPE_NUMBERS[torch.bfloat16]
        is_narrow = (records["param_dtype"] == narrow) & (records["grad_dtype"] == narrow)
        # The kernel multiplies what is there by 0, unless it skips the block.
        updates = [
            torch.full(
                (numel,),
                SKIPPED,
                dtype=torch.bfloat16 if here else torch.float32,
                device=self._device,
            )
            for numel, here in zip(_numels(units), is_narrow.tolist(), strict=True)
        ]
        records["param"] = [update.data_ptr() for update in updates]
        records["param_dtype"] = [DTYPE_NUMBERS[update.dtype] for update in updates]
        records["correction"], records["copy"] = 0, 0
        records["rounding"] = Rounding.NEAREST
        self._call.kernel.step(records, kernel.packed_scalars(list(map(forming, self._scalars))))
        nothing = torch.empty(0, dtype=dtype, device=self._device)
        return torch.cat([nothing, *(update.to(dtype) for update in updates)])

    def _apply(self, units: Sequence[Unit], update: Tensor) -> None:
        """Apply O to the parameters; (O4)."""
        update = update.to(self._device, torch.float32)
        records = self._call.records[[place for unit in units for place in unit.places]]
        owners = [unit.owner for unit in units for _ in unit.places]
        pieces = [piece for unit in units for piece in unit.pieces]
        scalars = []
        for record, piece, owner in zip(records, pieces, owners, strict=True):
            _, rows, columns = matrices_of(piece.shape)
            ratio = lr_ratio(self.groups[owner]["adjust_lr_fn"], rows, columns)
            scalars.append(applying(self._scalars[record["scalars"]], ratio))
        records["scalars"] = np.arange(len(records))
        starts = np.cumsum([0, *_numels(units)[:-1]]) * update.element_size()
        records["grad"] = np.uint64(update.data_ptr()) + starts.astype(np.uint64)
        records["grad_dtype"] = DTYPE_NUMBERS[torch.float32]
        records["moments"] = np.zeros((), records["moments"].dtype)
        # The moment is the gradient itself, which the kernel writes back as it is.
        records["moments"]["values"][:, 0] = records["grad"]
        records["moments"]["codec"][:, 0] = FLOAT32_MOMENTS
        if (counts := self._call.kernel.step(records, kernel.packed_scalars(scalars))) is not None:
            self.counts.append(([piece.name for piece in pieces], counts))


def _numels(units: Sequence[Unit]) -> list[int]:
    return [piece.numel for unit in units for piece in unit.pieces]


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


def _dtype(setting: str, device: torch.device) -> torch.dtype:
    """Return the dtype in which updates on a device are formed and orthogonalized."""
    if setting != "auto":
        return {"bfloat16": torch.bfloat16, "float32": torch.float32}[setting]
    if _computes_on(device).type != "cpu":
        return torch.bfloat16
    fast = torch.cpu.get_capabilities()
    return torch.bfloat16 if fast.get("avx512_bf16") or fast.get("amx_bf16") else torch.float32
