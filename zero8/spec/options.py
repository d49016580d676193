# SPDX-License-Identifier: Apache-2.0
"""Checks of the settings of a parameter group; every error says what was got and expected."""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from zero8.spec.shown import shown

SMALLEST_EPS = 2.0**-126
"""The smallest normal float: kernels flush smaller ones to 0, and 0/0 without a gradient is NaN."""

_MAX_NUMBER = torch.finfo(torch.float32).max


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a group without the classes of NumPy and of config libraries.

    `torch.load(weights_only=True)` refuses these, and OmegaConf's lists carry their whole config.
    Numbers become int, float or bool, and sequences tuples; lists and tensors stay what they are.
    """
    return {key: _plain(one) if key != "params" else one for key, one in settings.items()}


def _plain(setting: object) -> object:
    if isinstance(setting, np.ndarray):
        setting = tuple(setting.tolist()) if setting.ndim else setting.item()
    if not isinstance(setting, Sequence) or isinstance(setting, str | bytes):
        return _plain_number(setting)
    # Only their own items: a file's nested lists may have more than memory holds.
    items = map(_plain_number, setting)
    return list(items) if type(setting) is list else tuple(items)


def _plain_number(one: object) -> object:
    if type(one) in (bool, int, float):
        return one
    if isinstance(one, np.generic):
        return one.item()
    if isinstance(one, Integral):
        return int(one)
    return float(one) if isinstance(one, Real) else one


def check_option(name: str, value: Any, default: object) -> None:
    """Raise ValueError unless the value of a group's option is one that its default suggests.

    Options whose default is text, a whole number or another sequence have rules of their own.
    """
    if name == "lr":
        check_lr(name, value)
    elif name == "betas" and isinstance(default, tuple):
        _check_decay_rates(name, value, example=default)
    elif isinstance(default, bool):
        check_flag(name, value)
    elif isinstance(default, float) or (default is None and value is not None):
        check_not_negative(name, value)
    if name == "eps" and 0 < value < SMALLEST_EPS:
        raise ValueError(
            f"{name}: got {shown(value)}, expected 0 or at least {SMALLEST_EPS} (2^-126)"
        )


def check_flag(name: str, value: object) -> bool:
    """Return a bool, or raise ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: got {shown(value)}, expected true or false")
    return value


def check_not_negative(name: str, value: object) -> None:
    """Raise ValueError unless a value is a finite number and not negative."""
    if not isinstance(value, Real) or isinstance(value, bool) or not _in_range(value):
        quoted = ", without quotes (YAML reads 1e-3 as text: write 1.0e-3)"
        raise ValueError(
            f"{name}: got {shown(value)}, expected a finite number"
            + quoted * isinstance(value, str)
        )
    if value < 0.0:
        raise ValueError(f"{name}: got {shown(value)}, expected at least 0.0")


def check_lr(name: str, lr: object) -> None:
    """Raise ValueError unless a learning rate is a number or a tensor of one element."""
    if isinstance(lr, torch.Tensor):
        if lr.numel() != 1 or lr.is_meta or lr.layout != torch.strided:
            raise ValueError(
                f"{name}: got a tensor of shape {tuple(lr.shape)}, expected one element"
            )
        lr = lr.item()
    check_not_negative(name, lr)


def _check_decay_rates(name: str, rates: object, example: Sequence[float]) -> None:
    """Raise ValueError unless there are as many decay rates in [0, 1) as in the example."""
    if not isinstance(rates, Sequence) or isinstance(rates, str) or len(rates) != len(example):
        raise ValueError(
            f"{name}: got {_numbers_shown(rates)}, expected {_COUNTS[len(example)]} numbers, such "
            f"as {_numbers_shown(example)}"
        )
    for rate in rates:
        check_not_negative(name, rate)
        if rate >= 1.0:
            raise ValueError(f"{name}: got {shown(rate)}, expected numbers below 1")


_COUNTS = {2: "two", 3: "three"}


def _in_range(value: Any) -> bool:  # Real has no comparison with float in typeshed
    return bool(abs(value) <= _MAX_NUMBER)


def _numbers_shown(values: object) -> str:
    if isinstance(values, tuple | list) and len(values) < 5:
        return "[" + ", ".join(map(shown, values)) + "]"
    return shown(values)
