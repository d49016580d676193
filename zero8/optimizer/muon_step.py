# SPDX-License-Identifier: Apache-2.0
"""Steps of Muon, whose updates depend on whole matrices: equations (O1) to (O4).

The kernel forms the updates of some parameters in a buffer, they are orthogonalized there, and the
kernel applies them.  Each matrix is gathered on one rank (`zero8.optimizer.owners`), which is this
one if it holds it whole; those of equal shape are orthogonalized together.  Parameters step in
groups of one shape, so that few updates are in memory at a time.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from zero8.environment import ranks
from zero8.op import kernel
from zero8.op.structs import DTYPE_NUMBERS, FLOAT32_MOMENTS
from zero8.optimizer.batch import Batch, Group
from zero8.optimizer.call import Call
from zero8.optimizer.nonfinite import Counts
from zero8.optimizer.owners import Held, Round, rounds_of
from zero8.spec.muon import MUON, applying, forming, lr_ratio, matrices_of, ranges_by_matrix
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
    def is_cut(self) -> bool:
        """Whether other ranks have elements of one of the matrices, too."""
        size = math.prod(self.matrix_shape)
        return any(sum(run[2] for run in runs) < size for runs in self.runs.values())

    def held(self, like: int) -> Held:
        """Return what all ranks need to know of its matrices; see `Held`."""
        ranges = {n: tuple(run[1:] for run in runs) for n, runs in self.runs.items()}
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
    for identities, rounds, dtype in step.exchanges(units):
        step.take({one: units[one] for one in identities if one in units}, rounds, dtype)
    return step.counts


def _units_of(call: Call) -> Units:
    units: dict[int, Unit] = {}
    for place, (piece, owner) in enumerate(zip(call.pieces, call.kept["owner"], strict=True)):
        if piece.numel:
            unit = units.setdefault(piece.identity, Unit(int(owner)))
            unit.pieces.append(piece)
            unit.places.append(place)
    return units


class _Step:
    """The kernel calls of one step; `counts` are those of the calls that have applied updates."""

    def __init__(self, call: Call, batch: Batch, scalars: np.ndarray):
        self.groups, self.counts = batch.group_of_each, list[Counts]()
        self._call, self._params, self._device = call, batch.params, call.device
        count = len(MUON.scalars_type._fields)
        self._scalars = [MUON.scalars_type(*row[:count].tolist()) for row in scalars["numbers"]]

    def take(self, units: Units, rounds: Sequence[Round], dtype: torch.dtype) -> None:
        """Step parameters of one shape and group, whose matrices the rounds gather.

        This rank may have none of them, and takes part in the rounds nevertheless.
        """
        formed = self._formed(list(units.values()), dtype)
        updates = dict(zip(units, formed.split([one.numel for one in units.values()]), strict=True))

        def orthogonal(matrices: Tensor) -> Tensor:
            unit = next(iter(units.values()))
            return _orthogonal(matrices, unit.matrix_shape, self.groups[unit.owner])

        for one in rounds:
            here = [(at, n) for keys in one.owned for at, n in keys if at in units]
            views = [view for at, n in here for view in units[at].views(updates[at], n)]
            one.replace([formed[:0], *views], orthogonal)
        if units:
            self._apply(list(units.values()), formed)

    def exchanges(self, units: Units) -> list[Exchange]:
        """Return how all parameters step: those that are whole on this rank, and then the others.

        Ranks have agreed on the latter, and the kind keeps it: a plan can be made anew on some
        ranks only, which must not wait for the others then.
        """
        entries, agreed = self._call.entries, self._call.entries[0].kind.agreed
        whole, cut = (
            {identity: one for identity, one in units.items() if one.is_cut == is_cut}
            for is_cut in (False, True)
        )
        key = tuple(map(id, self._params))
        if key not in agreed:
            pairs = zip(entries, self._params, strict=True)
            agreed[key] = self._among([one.kind.process_group(p) for one, p in pairs], cut)
        exchanges: list[Exchange] = self._among([None] * len(entries), whole) + agreed[key]
        return exchanges

    def _among(self, ranks_of: Sequence[ranks.Group], units: Units) -> list[Exchange]:
        """Return how parameters step, process group by process group; None is this rank alone."""
        keys = [(one, group["ns_dtype"]) for one, group in zip(ranks_of, self.groups, strict=True)]
        first_in: dict[int, int] = {}
        for owner, group in enumerate(self.groups):
            first_in.setdefault(id(group), owner)
        exchanges: list[Exchange] = []
        for shared, setting in dict.fromkeys(keys):
            held = {
                identity: unit.held(first_in[id(self.groups[unit.owner])])
                for identity, unit in units.items()
                if keys[unit.owner] == (shared, setting)
            }
            # Processors may differ, but all ranks have to send the same dtype.
            here = int(_dtype(setting, self._device) is torch.float32)
            (is_float32,) = ranks.largest([here], [] if shared is None else [shared])
            dtype = torch.float32 if is_float32 else torch.bfloat16
            exchanges += [(*one, dtype) for one in rounds_of(held, shared, MAX_NUMEL)]
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
