# SPDX-License-Identifier: Apache-2.0
"""Figures on an optimizer's states, for monitors."""

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from zero8.checkpoint.read.statistics import NUM_CODES, saturated
from zero8.environment import ranks
from zero8.optimizer.blockwise import BlockwiseOptimizer
from zero8.optimizer.way_back import innermost
from zero8.spec.adam import ADAM
from zero8.spec.algorithm import MomentRule
from zero8.state.extent import local
from zero8.state.store import MomentStore

SAMPLE_NUMEL = 1 << 18
"""The most codes of each moment that are counted."""
UPDATES_NUMEL = 1 << 13
"""The most updates that are examined; it is smaller, as their moments must be decoded."""
MARGIN = 1.1
"""An update counts as clipped if it exceeds its bound by this factor."""
RUN_NUMEL = 4096
"""The number of consecutive codes in a sample: at least a whole block."""

Run = tuple[Tensor, Sequence[MomentStore], int, int, int]
"""Consecutive codes: a parameter, its moments, the number of a piece, begin and end in it."""


def health(optimizer: BlockwiseOptimizer) -> dict[str, float]:
    """Return figures on this rank's states, by names for a monitor.

    The names begin with `zero8/`, or with `zero8/rank0/` if there are several ranks; there is no
    communication.

    - state_bytes: moments with their scales, and weight corrections.
    - share_8bit: the share of elements with 8-bit moments.
    - nonfinite_blocks: the optimizer's `nonfinite_blocks`; a GPU's count arrives later.
    - exp_avg_at_top, exp_avg_at_floor, and for other moments: shares of saturated codes, as in
      `zero8 checkpoint inspect`, of `SAMPLE_NUMEL` codes: runs at equal distances over all tensors,
      the same ones each time.  Omitted if no codes are in memory.
    - clipped: Adam's only; of `UPDATES_NUMEL` elements with 8-bit moments, the share whose stored
      |m| is more than `MARGIN` times sqrt(K v), with K of (S1).  Steps clip such updates to the
      bound, which exact moments never exceed.  If gradients repeat, rounding alone can reach it.

    Args:
        optimizer: in plain PyTorch or FSDP2, or the one inside ZeRO's or Accelerate's wrappers.
    """
    moments = optimizer.all_moments()
    stores = [store for of_one in moments.values() for store in of_one]
    corrections = (optimizer.state[p].get("param_correction") for p in moments)
    held = [*stores, *(local(x) for x in corrections if x is not None)]
    in_8bit = sum(store.table.size(quantized=True) for store in stores)
    in_fp32 = sum(store.dense.numel() for store in stores)
    values = {
        "state_bytes": sum(one.nbytes for one in held),
        "share_8bit": in_8bit / max(1, in_8bit + in_fp32),
        "nonfinite_blocks": optimizer.nonfinite_blocks,
    }
    runs = _runs(moments)
    counts: dict[MomentRule, Tensor] = {}
    for _, stores, number, begin, end in _sample(runs, SAMPLE_NUMEL):
        for store in stores:
            codes = store.codes_of(number, begin, end).cpu()
            found = torch.bincount(codes, minlength=NUM_CODES)
            counts[store.rule] = counts.get(store.rule, 0) + found
    for rule, of_rule in counts.items():
        shares = saturated(optimizer.settings.codec.code_of(rule), of_rule)
        values |= {f"{rule.name}_{end}": share for end, share in shares.items()}
    if optimizer.algorithm is ADAM and runs:
        values["clipped"] = _clipped(optimizer, _sample(runs, UPDATES_NUMEL))
    prefix = "zero8/" if ranks.num_ranks() == 1 else f"zero8/rank{ranks.rank()}/"
    return {prefix + name: float(value) for name, value in values.items()}


def _runs(moments: Mapping[Tensor, Sequence[MomentStore]]) -> list[Run]:
    return [
        (p, stores, number, begin, min(begin + RUN_NUMEL, piece.numel))
        for p, stores in moments.items()
        for number, piece in enumerate(stores[0].table.pieces)
        if piece.is_quantized
        for begin in range(0, piece.numel, RUN_NUMEL)
    ]


def _sample(runs: list[Run], numel: int) -> list[Run]:
    return runs[:: max(1, math.ceil(len(runs) * RUN_NUMEL / numel))]


def _clipped(optimizer: BlockwiseOptimizer, runs: list[Run]) -> float:
    """Return the share of updates that (R5) clips, neglecting eps."""
    clipped = total = 0
    for p, (m, v), number, begin, end in runs:
        start = m.table.pieces[number].start + begin
        m, v = (store.read(start, end - begin).double() for store in (m, v))
        history = float(optimizer.state[p]["history"])
        clipped += int((m * m > MARGIN**2 * history * v).sum())
        total += end - begin
    return clipped / total


class Reports:
    """The health of an optimizer every `every` training steps, with the time of its steps.

    step_ms is the mean wall time of `optimizer.step` per training step since the last report;
    omitted if a parameter is on a GPU, for which the host does not wait.

    A report takes about 8 ms on a CPU, and 0.2 ms per state (ZeRO has one per partition): 0.7 % of
    the time of steps over a partition of 2^25, if every 50th step reports.
    """

    def __init__(self, optimizer, every: int):
        """Start the timing.

        Args:
            optimizer: one of zero8, or a wrapper of ZeRO or Accelerate around one.
            every: training steps between two reports.

        Raises:
            ValueError: if it is another optimizer, or `every` is not a positive integer.
        """
        self._optimizer = innermost(optimizer)
        if not isinstance(self._optimizer, BlockwiseOptimizer):
            name = type(self._optimizer).__name__
            raise ValueError(f"monitor: got {name}, expected an optimizer of zero8")
        if type(every) is not int or every < 1:
            raise ValueError(f"monitor: every: got {every!r}, expected a positive integer")
        self._every = every
        self._steps, self._seconds, self._began = 0, 0.0, 0.0
        self._hooks = (
            self._optimizer.register_step_pre_hook(self._begin),
            self._optimizer.register_step_post_hook(self._end),
        )

    def _begin(self, *_) -> None:
        self._began = time.perf_counter()

    def _end(self, *_) -> None:
        self._seconds += time.perf_counter() - self._began

    def after(self, step: int) -> dict[str, float]:
        """Return the report after a training step; {} unless `every` divides `step`."""
        self._steps += 1
        if step % self._every:
            return {}
        values = health(self._optimizer)
        if not any(p.is_cuda for p in self._optimizer.states):
            prefix = next(iter(values)).rpartition("/")[0]
            # ZeRO calls `optimizer.step` for each of its groups or sub-groups.
            values[f"{prefix}/step_ms"] = 1e3 * self._seconds / self._steps
        self._steps, self._seconds = 0, 0.0
        return values

    def close(self) -> None:
        """Stop the timing."""
        for hook in self._hooks:
            hook.remove()
