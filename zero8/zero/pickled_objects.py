# SPDX-License-Identifier: Apache-2.0
"""The objects that DeepSpeed's checkpoints hold beside tensors and plain data.

None of their classes does anything but keep values when an object of it is made.
"""

import argparse
from collections.abc import Callable

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

Restore = Callable[[tuple, dict], object]
"""Makes an object of its arguments and its attributes."""


def _with_attributes(kind: type) -> Restore:
    def restore(_args: tuple, attributes: dict) -> object:
        made = kind.__new__(kind)
        vars(made).update(attributes)
        return made

    return restore


RESTORE: dict[str, Restore] = {
    "argparse.Namespace": _with_attributes(argparse.Namespace),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _with_attributes(DynamicLossScaler),
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _with_attributes(LossScaler),
    "deepspeed.runtime.zero.config.ZeroStageEnum": lambda args, _: ZeroStageEnum(*args),
    "deepspeed.utils.tensor_fragment.fragment_address": lambda _, values: fragment_address(
        **values
    ),
    "torch.device": lambda args, _: torch.device(*args),
}
"""By the names of the classes, in pickles."""

DTYPES = {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
"""The dtypes of torch, which are pickled by their names alone."""
