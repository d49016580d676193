# SPDX-License-Identifier: Apache-2.0
"""Checks of a parameter and of its gradient before a step."""

import sys
from collections.abc import Collection

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero8.op import kernel
from zero8.op.cuda import DEVICES
from zero8.spec.algorithm import Algorithm
from zero8.spec.int8_rows import SCALE_DTYPES
from zero8.spec.shown import shown
from zero8.state.settings import Settings
from zero8.state.weights import CLASSES, Int8Rows, class_in_torchao, int8_rows, values_of

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


def check_new(label: str, p: Tensor, algorithm: Algorithm, settings: Settings) -> None:
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
    check_class(label, p, algorithm, settings)
    if p.dtype != torch.float16 or "deepspeed" not in sys.modules:
        _check_dtype(f"parameter {label}: got one", p, kernel.DTYPES)


def check_class(label: str, p: Tensor, algorithm: Algorithm, settings: Settings) -> None:
    """Raise ValueError if a parameter is of a class whose values no step can write."""
    values = values_of(p)
    if is_traceable_wrapper_subclass(values):
        raise ValueError(
            f"parameter {label}: got a tensor of class {shown(type(values).__name__)}, which has "
            "no storage of its own; expected a plain tensor, a DTensor, or one of torchao's "
            f"{', '.join(CLASSES)}"
        )
    if (rows := int8_rows(p)) is not None:
        _check_int8(label, p, rows, algorithm, settings)


def _check_int8(
    label: str, p: Tensor, rows: Int8Rows, algorithm: Algorithm, settings: Settings
) -> None:
    got = f"parameter {label}: got INT8 weights"
    if rows.scales.dtype not in SCALE_DTYPES:
        raise ValueError(
            f"{got} with scales of dtype {rows.scales.dtype}, expected one of {list(SCALE_DTYPES)}:"
            " convert the model by model.float() or model.to(torch.bfloat16) before quantize_"
        )
    if rows.scales.shape != rows.codes.shape[:1]:
        raise ValueError(
            f"{got} of {len(rows.codes)} rows with scales of shape {tuple(rows.scales.shape)}, "
            "expected one scale per row"
        )
    if rows.codes.shape[1] != p.shape[1]:
        raise ValueError(
            f"{got} of shape {tuple(p.shape)} of which this rank has {rows.codes.shape[1]} columns;"
            " expected whole rows, which have one scale each: shard dimension 0"
        )
    if algorithm.is_of_matrices:
        raise ValueError(
            f"{got}, expected floating-point weights for the matrices of Muon8bitBlockwise: use "
            "Adam8bitBlockwise, or put them into a group with use_muon=False"
        )
    if settings.correction_bits:
        raise ValueError(
            f"{got} and weight_correction_bits={settings.correction_bits}, which adds bits to "
            "bfloat16 weights alone; expected 0"
        )


def check_replaceable(label: str, p: Tensor) -> None:
    """Raise ValueError if DeepSpeed cannot replace a parameter by parts of flat buffers."""
    if name := class_in_torchao(p):
        raise ValueError(
            f"parameter {label}: got torchao's {name} under DeepSpeed, which copies parameters "
            "into flat buffers and so loses their class and their rows; expected plain tensors: "
            "train it with FSDP2 or in plain PyTorch "
            "(int8_mixed_precision_training(module_swap=True) keeps plain tensors)"
        )


def check_tensors(label: str, p: Tensor, grad: Tensor, is_int8: bool = False) -> None:
    """Raise ValueError if a local parameter or its local gradient is not supported.

    `is_int8` is for the codes of INT8 weights, which are stepped in float32.
    """
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
    if not is_int8:
        _check_dtype(f"{owner}got a parameter", p, kernel.DTYPES)
    what = f"{owner}got a gradient of a {p.dtype} parameter"
    _check_dtype(what, grad, kernel.DTYPES[torch.float32 if is_int8 else p.dtype])
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
