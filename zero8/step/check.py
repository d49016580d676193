# SPDX-License-Identifier: Apache-2.0
"""What a step asks of a parameter and of its gradient."""

import sys
from collections.abc import Collection

import torch
from torch import Tensor

from zero8.op import kernel
from zero8.op.devices import DEVICES

# What to set, by dtype that is not served.
REMEDIES = {
    torch.float16: "; to compute in float16 keep float32 weights: use torch.autocast, or "
    "DeepSpeed's fp16 without fp16_master_weights_and_grads"
}


def check_new(label: str, p: Tensor) -> None:
    """Raise ValueError if a parameter that an optimizer is made for can never be stepped.

    float16 ones can where DeepSpeed puts float32 masters in their place.
    """
    if p.layout != torch.strided:
        raise ValueError(f"parameter {label}: got layout {p.layout}, expected a dense parameter")
    if p.is_meta:
        raise ValueError(
            f"parameter {label}: got it on the meta device, where it stays: to_empty() and the "
            "like make another one; make the optimizer after them"
        )
    if p.dtype != torch.float16 or "deepspeed" not in sys.modules:
        _check_dtype(f"parameter {label}: got one", p, kernel.DTYPES)


def check_tensors(p: Tensor, grad: Tensor) -> None:
    """Raise ValueError if a parameter or its gradient, as this rank holds them, is not served."""
    if p.device.type not in DEVICES or (p.device.type == "cuda" and torch.version.hip):
        raise ValueError(
            f"got a parameter on {p.device}{' of ROCm' * bool(torch.version.hip)}, expected one on "
            'the CPU or a CUDA GPU: use DeepSpeed\'s "offload_optimizer": {"device": "cpu"}'
        )
    if grad.device != p.device:
        raise ValueError(f"got a gradient on {grad.device}, the parameter is on {p.device}")
    if grad.shape != p.shape:
        raise ValueError(
            f"got a gradient of shape {tuple(grad.shape)}, the parameter has {tuple(p.shape)}"
        )
    if grad.is_sparse:
        raise ValueError("got a sparse gradient; set sparse=False on the embedding")
    _check_dtype("got a parameter", p, kernel.DTYPES)
    _check_dtype(f"got a gradient of a {p.dtype} parameter", grad, kernel.DTYPES[p.dtype])
    for kind, tensor in (("parameter", p), ("gradient", grad)):
        if tensor.numel() and tensor.data_ptr() == 0:
            raise ValueError(
                f"got a {kind} of type {type(tensor).__name__} without storage of its own, "
                "expected a plain tensor or a DTensor"
            )


def _check_dtype(what: str, tensor: Tensor, dtypes: Collection[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        message = f"{what} of dtype {tensor.dtype}, expected one of {list(dtypes)}"
        raise ValueError(message + REMEDIES.get(tensor.dtype, ""))
