# SPDX-License-Identifier: Apache-2.0
"""What one step leaves for the next: the kernel's records of parameters, as long as they fit.

Making them takes about 100 microseconds a parameter, which lists of small tensors would feel; so
would checks that look at one parameter after the other.  No tensor is kept, only where tensors
were: whoever moves or frees parameters or states is not held up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from zero8 import dither
from zero8.op import kernel
from zero8.scalars import StepScalars
from zero8.segment import Segment

Contents = tuple[Sequence[object], Sequence[Tensor]]
"""What says how to read each of some states (equal where read alike), and all their tensors."""


class Batch(NamedTuple):
    """Parameters that one call of the kernel steps over: their groups, themselves, gradients."""

    groups: Sequence[dict]
    params: Sequence[Tensor]
    grads: Sequence[Tensor]


def premises_of(batch: Batch, contents: Contents) -> tuple:
    """Return all that the records of parameters depend on: equal for equal records."""
    _, params, grads = batch
    descriptions, states = contents
    return (
        [p.dtype for p in params],
        [grad.dtype for grad in grads],
        [p.numel() for p in params],
        [grad.numel() for grad in grads],
        [p.is_cpu for p in params],
        [grad.is_cpu for grad in grads],
        [grad.is_sparse for grad in grads],
        descriptions,
        # A tensor that is not contiguous is never where a record could say.
        [t.data_ptr() if t.is_contiguous() else None for t in states],
    )


@dataclass(frozen=True)
class Prepared:
    """The records of one or more parameters.

    Attributes:
        premises: what `premises_of` gave when they were made.
        records: (pieces,) `kernel.SEGMENT`, in the order of the parameters.  In place of the
            addresses of parameter and gradient they have offsets in bytes, in place of the phases
            of the two dithers their keys.
        owner: (pieces,) which of the parameters each belongs to.
    """

    premises: tuple
    records: np.ndarray
    owner: np.ndarray

    @classmethod
    def of(
        cls, premises: tuple, flat: tuple[Tensor, Tensor], segments: Sequence[Segment]
    ) -> "Prepared":
        """Return the records of one parameter.

        Args:
            premises: its own.
            flat: the parameter and its gradient, or copies, in one dimension.
            segments: which lie in these two and in the live state; keys stand for their phases.
        """
        records, _ = kernel.packed(segments)
        for name, tensor in zip(("param", "grad"), flat, strict=True):
            records[name] -= np.uint64(tensor.data_ptr())
        return cls(premises, records, np.zeros(len(records), np.intp))

    @classmethod
    def joined(cls, premises: tuple, parts: Sequence["Prepared"]) -> "Prepared":
        """Return the records of parameters that are prepared one by one.

        Args:
            premises: of all of them.
            parts: one each, in order.
        """
        records = np.concatenate([part.records for part in parts])
        owner = np.repeat(np.arange(len(parts)), [len(part.records) for part in parts])
        return cls(premises, records, owner)


class Moved(NamedTuple):
    """Where a step takes the moments of the parameters that come from the same place.

    Attributes:
        step: the number of the step, from 1.
        history: bound on m^2/v after it.
        scalars: of the step.
    """

    step: int
    history: float
    scalars: StepScalars


def run(
    prepared: Prepared,
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moved: Sequence[Moved],
    num_threads: int,
    isa: str,
) -> np.ndarray:
    """Step over parameters, in place, in one call of the kernel.

    Args:
        prepared: their records.
        params: contiguous.
        grads: of the parameters, of any layout.
        moved: of the parameters; few distinct ones.
        num_threads: threads to use.
        isa: instruction set, one of `kernel.isas()`.

    Returns:
        For each piece the number of blocks left as they were because a gradient was not finite.
    """
    grads = [grad if grad.is_contiguous() else grad.contiguous() for grad in grads]
    records, owner = prepared.records.copy(), prepared.owner
    records["param"] += _addresses(params)[owner]
    records["grad"] += _addresses(grads)[owner]
    # Their identity is enough: comparing them all would take longer.
    distinct = {id(one): one for one in moved}
    numbers = {key: number for number, key in enumerate(distinct)}
    number = np.fromiter([numbers[id(one)] for one in moved], np.intp, len(moved))[owner]
    steps = np.array([one.step for one in distinct.values()], np.int64)[number]
    for name in ("moment_phase", "param_phase"):
        records[name] = dither.phase_of(records[name].astype(np.int64), steps)
    records["scalars"] = number
    scalars = kernel.packed_scalars(one.scalars for one in distinct.values())
    kernel.run(records, scalars, num_threads, isa)
    return records["nonfinite_blocks"]


def _addresses(tensors: Sequence[Tensor]) -> np.ndarray:
    return np.fromiter([t.data_ptr() for t in tensors], np.uint64, len(tensors))
