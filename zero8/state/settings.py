# SPDX-License-Identifier: Apache-2.0
"""The settings of a whole optimizer, and their effect on the state of each parameter."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zero8.spec.adam import ADAM
from zero8.spec.algorithm import Algorithm
from zero8.spec.algorithms import algorithm_called
from zero8.spec.buffers import check_entry
from zero8.spec.codec import Codec, codec_named
from zero8.spec.segment import Rounding
from zero8.state.header import Entries
from zero8.state.memory_report import MemoryRow
from zero8.state.params import ParamInfo
from zero8.state.policy import Decision, Policy
from zero8.state.store import MomentStore
from zero8.state.table import Piece

logger = logging.getLogger("zero8")


@dataclass(frozen=True)
class Settings:
    """The settings of an optimizer that hold for all its parameter groups.

    Attributes:
        policy: which parameters get 8-bit moments.
        codec_name: the codec of new states.
        rounding: the rounding of bfloat16 and INT8 parameters.
        correction_bits: bits kept beside each bfloat16 weight, 0 or 8.
        seed: the seed of the dither.
        bias_correction: whether to correct the bias of the moments toward 0.
        algorithm_name: the algorithm's name in saved states.
    """

    policy: Policy
    codec_name: str
    rounding: Rounding
    correction_bits: int
    seed: int
    bias_correction: bool
    algorithm_name: str = ADAM.name

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of all steps."""
        return algorithm_called(self.algorithm_name)

    @property
    def codec(self) -> Codec:
        """The codec of new states."""
        return codec_named(self.codec_name)

    def decide(self, info: ParamInfo) -> Decision:
        """Return whether a parameter gets 8-bit moments; see `Policy.decide`."""
        return self.policy.decide(info.name, info.shape, info.why_float32)

    def piece(self, info: ParamInfo, start: int, numel: int, first: int) -> Piece:
        """Return a piece of a parameter, 8-bit or float32 as the policy decides; see `Piece`."""
        grid = self.decide(info).grid
        block_size = grid.block_size if grid else 0
        return Piece(start, numel, first, info.shape, info.identity, block_size, info.label)

    def corrects(self, p: Tensor) -> bool:
        """Return whether the state of a parameter holds a correction of its values."""
        return self.correction_bits == 8 and p.dtype == torch.bfloat16

    def correction_from(self, p: Tensor, saved: Entries) -> Entries:
        """Return the correction entry of a loaded state, {} if it has or needs none."""
        correction = saved.get("param_correction")
        if correction is None:
            return {}
        if not self.corrects(p):
            logger.warning("weight_correction_bits is 0: ignoring the corrections in a checkpoint")
            return {}
        check_entry("param_correction", correction, p.numel(), [torch.int8])
        if correction.shape != p.shape:
            raise ValueError(
                f"param_correction: got {tuple(correction.shape)}, expected {tuple(p.shape)}"
            )
        return {"param_correction": correction.to(p.device, copy=True).contiguous()}

    def memory_rows(
        self,
        stores: Sequence[MomentStore],
        corrected: bool,
        why_float32: Mapping[str, str],
    ) -> list[MemoryRow]:
        """Return the memory of moments, a row per parameter of their segment table.

        `corrected` says whether there are corrections of bfloat16 weights, `why_float32` is
        `ParamInfo.why_float32` by label.
        """
        rows: dict[str, MemoryRow] = {}
        for number, piece in enumerate(stores[0].table.pieces):
            moments = [store.piece(number) for store in stores]
            tensors = [t for m in moments for t in (m.values, m.scales)]
            state_bytes = sum(t.nbytes for t in tensors if t is not None)
            why = why_float32.get(piece.name, "")
            reason = self.policy.decide(piece.name, piece.shape, why).reason
            bits = self.codec.bits_of(self.algorithm.moments) if piece.is_quantized else 32
            sizes = (piece.numel, bits, reason, state_bytes, piece.numel * corrected)
            row = MemoryRow(piece.name, piece.shape, *sizes)
            # A box that is not one run of elements has several pieces.
            rows[piece.name] = row + rows[piece.name] if piece.name in rows else row
        return list(rows.values())
