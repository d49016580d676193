# SPDX-License-Identifier: Apache-2.0
"""The kernel records of a parameter, which are kept between steps.

Making them takes about 100 microseconds per parameter, much compared with the step of a small
tensor.  They hold addresses, never tensors, so they keep nothing alive.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from zero8.op import kernel
from zero8.op.describe import Seen
from zero8.op.structs import KEPT_PIECE
from zero8.spec.segment import Segment
from zero8.state.kind import StateKind


@dataclass(frozen=True, eq=False)
class ParamRecords:
    """The records of one parameter, and what they depend on.

    Attributes:
        kind: the kind of its state.
        seen: what they were made from; they fit where that is so again.
        records: (pieces,) `SEGMENT`; `zero8.step.plan` fills in what changes from step to step.
        kept: (pieces,) `KEPT_PIECE`, what does not change.
        labels: what the parameter of each piece is called.
    """

    kind: StateKind
    seen: Seen
    records: np.ndarray
    kept: np.ndarray
    labels: tuple[str, ...]

    @classmethod
    def of(
        cls,
        kind: StateKind,
        seen: Seen,
        labels: tuple[str, ...],
        flat: tuple[Tensor, Tensor],
        segments: Sequence[Segment],
        keys: Sequence[tuple[list[int], int]],
    ) -> "ParamRecords":
        """Return the records of one parameter.

        Args:
            kind: as the attribute.
            seen: as the attribute.
            labels: as the attribute.
            flat: the parameter and its gradient, or copies, in one dimension.
            segments: its pieces, which lie in these two and in the live state.
            keys: of each segment, those of the dithers of its moments and of the parameter.
        """
        records = kernel.records_of(segments, flat[0].device, {})
        kept = np.zeros(len(records), KEPT_PIECE)
        for name, tensor in zip(("param", "grad"), flat, strict=True):
            kept[f"{name}_offset"] = records[name] - np.uint64(tensor.data_ptr())
        for one, (moment_keys, param_key) in zip(kept, keys, strict=True):
            one["moment_keys"][: len(moment_keys)] = moment_keys
            one["param_key"] = param_key
        return cls(kind, seen, records, kept, labels)
