# SPDX-License-Identifier: Apache-2.0
"""The kernel records of a parameter, kept between steps.

Making them takes about 100 microseconds per parameter, long compared with the step of a small
tensor.  They hold addresses, not tensors, so they keep nothing alive but sums of their own.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from zero8.op import kernel
from zero8.op.describe import Snapshot
from zero8.op.structs import FLOAT32_MOMENTS, KEPT_PIECE
from zero8.spec.segment import Segment
from zero8.state.kind import StateKind
from zero8.state.table import Piece


@dataclass(frozen=True, eq=False)
class ParamRecords:
    """The records of one parameter, and the tensors that they depend on.

    Attributes:
        kind: the kind of its state.
        snapshot: the tensors that they were made for; they are valid while these match.
        records: (pieces,) `SEGMENT`; `zero8.op.kernel.fill` sets the fields that steps change.
        kept: (pieces,) `KEPT_PIECE`, the constants that `fill` needs.
        pieces: the pieces.
        weight_sums: the sums to which the records refer, None without a correction.
    """

    kind: StateKind
    snapshot: Snapshot
    records: np.ndarray
    kept: np.ndarray
    pieces: tuple[Piece, ...]
    weight_sums: Tensor | None

    @classmethod
    def of(
        cls,
        kind: StateKind,
        snapshot: Snapshot,
        pieces: tuple[Piece, ...],
        flat: tuple[Tensor, Tensor],
        segments: Sequence[Segment],
        keys: Sequence[tuple[list[int], int]],
        weight_sums: Tensor | None,
    ) -> "ParamRecords":
        """Return the records of one parameter.

        Args:
            kind: see the attribute.
            snapshot: see the attribute.
            pieces: see the attribute.
            flat: the parameter and its gradient, or contiguous copies, in one dimension.
            segments: its pieces, views of `flat` and of the live state.
            keys: for each segment, the dither keys of its moments and that of the parameter.
            weight_sums: see the attribute.
        """
        records = kernel.records_of(segments, flat[0].device, {})
        kept = np.zeros(len(records), KEPT_PIECE)
        for name, tensor in zip(("param", "grad"), flat, strict=True):
            kept[f"{name}_offset"] = records[name] - np.uint64(tensor.data_ptr())
        for one, (moment_keys, param_key) in zip(kept, keys, strict=True):
            one["moment_keys"][: len(moment_keys)] = moment_keys
            one["param_key"] = param_key
        return cls(kind, snapshot, records, kept, pieces, weight_sums)

    def has_floats_of(self, before: "ParamRecords") -> bool:
        """Return whether the float32 moments are the tensors that they were before."""
        addresses = [
            one.records["moments"]["values"][one.records["moments"]["codec"] == FLOAT32_MOMENTS]
            for one in (self, before)
        ]
        return np.array_equal(*addresses)
