# SPDX-License-Identifier: Apache-2.0
"""The kinds of parameters that a step is timed on."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Variant:
    """Dtypes of parameters and gradients, and the number of further bits kept per weight."""

    name: str
    title: str
    dtype: torch.dtype
    grad_dtype: torch.dtype
    correction_bits: int = 0


_FP32, _BF16 = torch.float32, torch.bfloat16
FP32 = Variant("fp32", "fp32 parameters and gradients", _FP32, _FP32)
BF16 = Variant("bf16", "bf16 parameters and gradients", _BF16, _BF16)
BF16_CORRECTED = Variant(
    "bf16_corrected", "bf16 parameters with 8 more bits each, and bf16 gradients", _BF16, _BF16, 8
)
VARIANTS = (FP32, BF16, BF16_CORRECTED)
CUDA_VARIANTS = (
    *VARIANTS,
    Variant("fp32_bf16_grad", "fp32 parameters, bf16 gradients", _FP32, _BF16),
    Variant("fp32_fp16_grad", "fp32 parameters, fp16 gradients", _FP32, torch.float16),
)
"""On a GPU, autocast and ZeRO also make gradients with fewer bits than the weights."""
