# SPDX-License-Identifier: Apache-2.0
"""The kinds of parameters that a step is timed on."""

from typing import NamedTuple

import torch


class Variant(NamedTuple):
    """Dtypes of parameters and gradients, and the number of further bits kept per weight."""

    name: str
    dtype: torch.dtype
    grad_dtype: torch.dtype
    correction_bits: int = 0


FP32 = Variant("fp32", torch.float32, torch.float32)
BF16 = Variant("bf16", torch.bfloat16, torch.bfloat16)
BF16_CORRECTED = Variant("bf16_corrected", torch.bfloat16, torch.bfloat16, 8)
VARIANTS = (FP32, BF16, BF16_CORRECTED)
CUDA_VARIANTS = (
    *VARIANTS,
    Variant("fp32_bf16_grad", torch.float32, torch.bfloat16),
    Variant("fp32_fp16_grad", torch.float32, torch.float16),
)
"""On a GPU, autocast and ZeRO also make gradients with fewer bits than the weights."""
