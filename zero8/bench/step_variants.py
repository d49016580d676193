# SPDX-License-Identifier: Apache-2.0
"""The kinds of parameters that a step is timed on."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Variant:
    """A type of parameters and gradients, and whether 8 more bits of each weight are kept."""

    name: str
    title: str
    dtype: torch.dtype
    correction_bits: int = 0


FP32 = Variant("fp32", "fp32 parameters and gradients", torch.float32)
BF16 = Variant("bf16", "bf16 parameters and gradients", torch.bfloat16)
BF16_CORRECTED = Variant(
    "bf16_corrected", "bf16 parameters with 8 more bits each, and bf16 gradients", torch.bfloat16, 8
)
VARIANTS = (FP32, BF16, BF16_CORRECTED)
