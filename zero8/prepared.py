# SPDX-License-Identifier: Apache-2.0
"""What one step leaves for the next: the kernel's records of a parameter, as long as they fit.

Making them takes about 100 microseconds a parameter, which lists of small tensors would feel.  No
tensor is kept, only where tensors were: whoever moves or frees parameters or states is not held up.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from zero8 import dither
from zero8.op import kernel
from zero8.scalars import StepScalars
from zero8.segment import Segment

Places = tuple
"""Types, sizes and addresses; see `places_of`."""


def places_of(p: Tensor, states: Sequence[Tensor], description: object) -> Places:
    """Return what the records of a parameter depend on.

    Args:
        p: the parameter, with its gradient.
        states: the tensors that hold its state; records of others than contiguous ones never fit.
        description: what says how to read the state.
    """
    addresses = [(t.data_ptr(), t.numel(), t.is_contiguous()) for t in states]
    return p.dtype, p.grad.dtype, p.numel(), description, *addresses


@dataclass(frozen=True)
class Prepared:
    """The records of one parameter.

    Attributes:
        places: what they depend on, as it was when they were made.
        records: the bytes of one `kernel.SEGMENT` per piece; in place of the addresses of parameter
            and gradient they have offsets in bytes.
        keys: (pieces, 2) int64, keys of the second moment's dither and of the parameter's.
        labels: the names of the pieces.
    """

    places: Places
    records: bytes
    keys: np.ndarray
    labels: tuple[str, ...]

    @classmethod
    def of(
        cls,
        places: Places,
        param: Tensor,
        grad: Tensor,
        segments: Sequence[Segment],
        keys: Sequence[tuple[int, int]],
        labels: Sequence[str],
    ) -> "Prepared":
        """Return the records of segments of a parameter and its gradient."""
        records, _ = kernel.packed(segments)
        for name, tensor in (("param", param), ("grad", grad)):
            records[name] -= np.uint64(tensor.data_ptr())
        keys = np.array(keys, np.int64).reshape(-1, 2)
        return cls(places, records.tobytes(), keys, tuple(labels))


class Turn(NamedTuple):
    """One parameter in one step: its records, contiguous tensors, the number of the step from 1."""

    prepared: Prepared
    param: Tensor
    grad: Tensor
    step: int
    scalars: StepScalars


def run_turns(turns: Sequence[Turn], num_threads: int, isa: str) -> dict[str, int]:
    """Step over parameters, in place, in one call of the kernel.

    Returns:
        The non-finite blocks by label, of the pieces that have any.
    """
    if not turns:
        return {}
    counts = [len(turn.prepared.labels) for turn in turns]
    joined = bytearray().join([turn.prepared.records for turn in turns])
    records = np.frombuffer(joined, kernel.SEGMENT)
    records["param"] += np.repeat(_unsigned(turn.param.data_ptr() for turn in turns), counts)
    records["grad"] += np.repeat(_unsigned(turn.grad.data_ptr() for turn in turns), counts)
    # Scalars are shared by many parameters, so their identity is enough.
    scalars = {id(turn.scalars): turn.scalars for turn in turns}
    numbers = {key: number for number, key in enumerate(scalars)}
    records["scalars"] = np.repeat([numbers[id(turn.scalars)] for turn in turns], counts)
    steps = np.repeat([turn.step for turn in turns], counts)
    keys = np.concatenate([turn.prepared.keys for turn in turns])
    records["moment_phase"] = dither.phase_of(keys[:, 0], steps)
    records["param_phase"] = dither.phase_of(keys[:, 1], steps)
    kernel.run(records, kernel.packed_scalars(scalars.values()), num_threads, isa)
    nonfinite = records["nonfinite_blocks"]
    if not nonfinite.any():
        return {}
    labels = [label for turn in turns for label in turn.prepared.labels]
    return {label: int(n) for label, n in zip(labels, nonfinite, strict=True) if n}


def _unsigned(numbers: Iterable[int]) -> np.ndarray:
    return np.fromiter(numbers, np.uint64)
