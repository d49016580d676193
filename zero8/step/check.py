# SPDX-License-Identifier: Apache-2.0
"""Checks of a parameter and of its gradient before a step."""

import sys
from collections.abc import Collection

import torch
from torch import Tensor

from zero8.op import kernel
from zero8.op.devices import DEVICES

_REAL_VIEW = (
    "; make the parameter torch.view_as_real(...) of it in float32, and call "
    "torch.view_as_complex on it in the forward"
)

# What to do about each dtype that is not supported.
REMEDIES = {
    torch.float16: "; to compute in float16 keep float32 weights: use torch.autocast, or "
    "DeepSpeed's fp16 without fp16_master_weights_and_grads",
    torch.float64: "; before the optimizer is made convert the model by model.float() or "
    "model.to(torch.bfloat16)",
    torch.complex64: _REAL_VIEW,
    torch.complex128: _REAL_VIEW,
}


def check_new(label: str, p: Tensor) -> None:
    """Raise ValueError if a parameter of a new optimizer can never take a step.

    A float16 one can under DeepSpeed, which replaces it by a float32 master copy.
    """
    if p.layout != torch.strided:
        raise ValueError(f"parameter {label}: got layout {p.layout}, expected a dense parameter")
    if p.is_meta:
        raise ValueError(
            f"parameter {label}: got one on the meta device; to_empty() and the like replace it, "
            "so make the optimizer after them"
        )
    if p.dtype != torch.float16 or "deepspeed" not in sys.modules:
        _check_dtype(f"parameter {label}: got one", p, kernel.DTYPES)


def check_tensors(label: str, p: Tensor, grad: Tensor) -> None:
    """Raise ValueError if a local parameter or its local gradient is not supported."""
    owner = f"parameter {label}: "
    if p.device.type not in DEVICES or (p.device.type == "cuda" and torch.version.hip):
        raise ValueError(
            f"{owner}got a parameter on {p.device}{' of ROCm' * bool(torch.version.hip)}, expected "
            'one on the CPU or a CUDA GPU: use DeepSpeed\'s "offload_optimizer": {"device": "cpu"}'
        )
    if grad.device != p.device:
        raise ValueError(f"{owner}got a gradient on {grad.device}, the parameter is on {p.device}")
    if grad.shape != p.shape:
        shapes = f"{tuple(grad.shape)}, the parameter has {tuple(p.shape)}"
        raise ValueError(f"{owner}got a gradient of shape {shapes}")
    if grad.is_sparse:
        raise ValueError(f"{owner}got a sparse gradient; set sparse=False on the embedding")
    _check_dtype(f"{owner}got a parameter", p, kernel.DTYPES)
    what = f"{owner}got a gradient of a {p.dtype} parameter"
    _check_dtype(what, grad, kernel.DTYPES[p.dtype])
    for kind, tensor in (("parameter", p), ("gradient", grad)):
        if tensor.numel() and tensor.data_ptr() == 0:
            raise ValueError(
                f"{owner}got a {kind} of type {type(tensor).__name__} without storage of its own, "
                "expected a plain tensor or a DTensor"
            )


def _check_dtype(what: str, tensor: Tensor, dtypes: Collection[torch.dtype]) -> None:
    if tensor.dtype not in dtypes:
        message = f"{what} of dtype {tensor.dtype}, expected one of {list(dtypes)}"
        raise ValueError(message + REMEDIES.get(tensor.dtype, ""))
