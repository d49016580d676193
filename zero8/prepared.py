# SPDX-License-Identifier: Apache-2.0
"""What one step leaves for the next: the kernel's records of a parameter, as long as they fit.

Making them takes about 100 microseconds a parameter, which lists of small tensors would feel.  No
tensor is kept, only where tensors were: whoever moves or frees parameters or states is not held up.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from zero8 import dither
from zero8.op import kernel
from zero8.scalars import StepScalars
from zero8.segment import Segment

Contents = tuple[object, Sequence[Tensor]]
"""What says how to read a state (equal where states are read alike), and the tensors of it."""


@dataclass(frozen=True)
class Prepared:
    """The records of one parameter, and what they depend on.

    Attributes:
        ref: the parameter, as long as it lives.
        param_dtype: of the parameter.
        grad_dtype: of its gradient.
        numel: of both.
        description: what says how to read the state.
        addresses: of the tensors that hold the state.
        records: the bytes of one `kernel.SEGMENT` per piece; in place of the addresses of parameter
            and gradient they have offsets in bytes.
        keys: (pieces, 2) int64, keys of the second moment's dither and of the parameter's.
        labels: the names of the pieces.
    """

    ref: weakref.ref
    param_dtype: torch.dtype
    grad_dtype: torch.dtype
    numel: int
    description: object
    addresses: list[int | None]
    records: bytes
    keys: np.ndarray
    labels: tuple[str, ...]

    @classmethod
    def of(
        cls,
        p: Tensor,
        contents: Contents,
        flat: tuple[Tensor, Tensor],
        segments: Sequence[Segment],
        keys: Sequence[tuple[int, int]],
        labels: Sequence[str],
    ) -> "Prepared":
        """Return the records of a parameter that has a gradient.

        Args:
            p: the parameter.
            contents: of its state, whose tensors are contiguous.
            flat: the parameter and its gradient, or copies, in one dimension.
            segments: which lie in these two and in the live state.
            keys: of the two dithers, for each segment.
            labels: names of the segments.
        """
        description, states = contents
        records, _ = kernel.packed(segments)
        for name, tensor in zip(("param", "grad"), flat, strict=True):
            records[name] -= np.uint64(tensor.data_ptr())
        return cls(
            weakref.ref(p),
            p.dtype,
            p.grad.dtype,
            p.numel(),
            description,
            _addresses(states),
            records.tobytes(),
            np.array(keys, np.int64).reshape(-1, 2),
            tuple(labels),
        )

    def fits(self, p: Tensor, contents: Contents) -> bool:
        """Return whether the records are those of a parameter, its gradient and its state now."""
        grad, (description, states) = p.grad, contents
        return (
            self.ref() is p
            and p.dtype is self.param_dtype
            and grad.dtype is self.grad_dtype
            and p.numel() == self.numel == grad.numel()
            and p.is_cpu
            and grad.is_cpu
            and not grad.is_sparse
            and description == self.description
            and _addresses(states) == self.addresses
        )


def _addresses(states: Sequence[Tensor]) -> list[int | None]:
    # A tensor that is not contiguous is never where a record could say.
    return [t.data_ptr() if t.is_contiguous() else None for t in states]


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
