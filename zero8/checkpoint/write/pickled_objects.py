# SPDX-License-Identifier: Apache-2.0
"""The objects in DeepSpeed's checkpoints besides tensors and plain data.

Their classes only hold values, which are checked before an object is made.
"""

import argparse
from collections.abc import Callable

import torch
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address

from zero8.spec.grid import MAX_NUMEL

Restore = Callable[[tuple, dict], object]
"""Makes an object from its arguments and its attributes."""


def _with_attributes(kind: type) -> Restore:
    def restore(args: tuple, attributes: dict) -> object:
        names = list(attributes)
        if args or not all(isinstance(n, str) and not n.startswith("__") for n in names):
            raise ValueError(f"got arguments or attributes that a {kind.__name__} does not have")
        made = kind.__new__(kind)
        vars(made).update(attributes)
        return made

    return restore


def _stage(args: tuple, _: dict) -> ZeroStageEnum:
    if len(args) != 1 or type(args[0]) is not int or args[0] not in range(4):
        raise ValueError("got a stage of ZeRO other than 0 to 3")
    return ZeroStageEnum(args[0])


def _member(args: tuple, _: dict) -> ZeroStageEnum:
    """Return a stage of ZeRO that Python 3.11.0 to 3.11.3 has pickled, by its name."""
    owner, name = args if len(args) == 2 else (None, None)
    if owner is not ZeroStageEnum or name not in list(ZeroStageEnum.__members__):
        raise ValueError("got an attribute of a class or function")
    return ZeroStageEnum[name]


def _address(args: tuple, attributes: dict) -> fragment_address:
    numbers = list(attributes.values())
    is_place = not args and set(attributes) == {"numel", "start"}
    if not is_place or not all(type(n) is int and 0 <= n <= MAX_NUMEL for n in numbers):
        raise ValueError("got an impossible place of a parameter")
    return fragment_address(**attributes)


def _device(args: tuple, _: dict) -> torch.device:
    kind, *index = args or ("",)
    if (
        kind not in ("cpu", "cuda", "meta")
        or len(index) > 1
        or any(type(n) is not int for n in index)
    ):
        raise ValueError("got an impossible device")
    return torch.device(kind, *index)


_STAGES = "deepspeed.runtime.zero.config.ZeroStageEnum"

RESTORE: dict[str, Restore] = {
    "builtins.getattr": _member,
    "argparse.Namespace": _with_attributes(argparse.Namespace),
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler": _with_attributes(DynamicLossScaler),
    "deepspeed.runtime.fp16.loss_scaler.LossScaler": _with_attributes(LossScaler),
    _STAGES: _stage,
    "deepspeed.utils.tensor_fragment.fragment_address": _address,
    "torch.device": _device,
}
"""By name of the class in pickles."""

CONSTANTS: dict[str, object] = {
    str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)
}
CONSTANTS[_STAGES] = ZeroStageEnum
"""What is pickled by name: torch's dtypes, and the class of `_member`."""
