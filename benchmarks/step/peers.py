# SPDX-License-Identifier: Apache-2.0
"""Optimizers of other packages that are timed, and the kinds of parameters that they step."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from zero8.bench import set_threads
from zero8.spec.adam import ADAM
from zero8.spec.ademamix import ADEMAMIX
from zero8.spec.lion import LION
from zero8.spec.sgd import SGD


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
# On a GPU, autocast and ZeRO also make gradients with fewer bits than the weights.
CUDA_VARIANTS = (
    *VARIANTS,
    Variant("fp32_bf16_grad", torch.float32, torch.bfloat16),
    Variant("fp32_fp16_grad", torch.float32, torch.float16),
)


class Peer(NamedTuple):
    """Optimizers of another package.

    Attributes:
        classes: the optimizers by name of the algorithm, as `module:class`.
        cpu: their variants on a CPU; () if they do not support CPUs.
        cuda: their variants on a GPU; () if they do not support GPUs.
        keywords: returns the keywords for a variant besides the settings that all packages get.
        prepare: is called with a new optimizer.
        is_slow_on_cpu: whether they are tens of times slower on a CPU.
        unread: by name of the algorithm, entries of states that steps never read.
    """

    classes: Mapping[str, str]
    cpu: tuple[Variant, ...] = ()
    cuda: tuple[Variant, ...] = ()
    keywords: Callable[[Variant], dict[str, Any]] = lambda variant: {}
    prepare: Callable[[Optimizer], object] = lambda optimizer: None
    is_slow_on_cpu: bool = False
    unread: Mapping[str, Sequence[str]] = MappingProxyType({})


PEERS = {
    "deepspeed": Peer(
        {
            ADAM.name: "deepspeed.ops.adam:DeepSpeedCPUAdam",
            LION.name: "deepspeed.ops.lion:DeepSpeedCPULion",
        },
        cpu=(FP32, BF16),
        keywords=lambda variant: {"fp32_optimizer_states": False},  # but the parameters' dtype
        prepare=set_threads,
        unread={LION.name: ["exp_avg_sq"]},
    ),
    "torch": Peer(
        {ADAM.name: "torch.optim:AdamW", SGD.name: "torch.optim:SGD"},
        cpu=(FP32,),
        cuda=(FP32, BF16),
        keywords=lambda variant: {"fused": True},
    ),
    "bitsandbytes": Peer(
        {
            ADAM.name: "bitsandbytes.optim:AdamW8bit",
            LION.name: "bitsandbytes.optim:Lion8bit",
            SGD.name: "bitsandbytes.optim:SGD8bit",
            ADEMAMIX.name: "bitsandbytes.optim:AdEMAMix8bit",
        },
        cpu=(FP32,),
        cuda=(FP32, BF16),
        is_slow_on_cpu=True,
    ),
    "torchao": Peer(
        {ADAM.name: "torchao.optim:AdamW8bit"},
        cpu=(FP32,),
        cuda=(FP32,),
        keywords=lambda variant: {"block_size": 256},
        is_slow_on_cpu=True,
    ),
    "flashoptim": Peer(
        {
            ADAM.name: "flashoptim:FlashAdamW",
            LION.name: "flashoptim:FlashLion",
            SGD.name: "flashoptim:FlashSGD",
        },
        cuda=(FP32, BF16_CORRECTED),
        keywords=lambda variant: {"master_weight_bits": 24 if variant.correction_bits else None},
    ),
}
