# SPDX-License-Identifier: Apache-2.0
"""Gradients: of another dtype than their parameter's, as torch's `grad_dtype` allows; bytes."""

import copy
from collections import Counter
from collections.abc import Iterable

from torch import Tensor

from zero8.state.extent import local


def has_other_dtype(p: Tensor) -> bool:
    """Return whether a parameter has a gradient of another dtype than its own."""
    return p.grad is not None and p.grad.dtype != p.dtype


def grad_bytes_by_dtype(params: Iterable[Tensor]) -> dict[str, int]:
    """Return, by name of dtype, the bytes of the gradients that parameters have in this process."""
    found: Counter[str] = Counter()
    for p in params:
        if p.grad is not None:
            found[str(p.grad.dtype).removeprefix("torch.")] += local(p.grad).nbytes
    return dict(found)


def set_grad(p: Tensor, grad: Tensor) -> None:
    """Set the gradient of a parameter, whatever its dtype."""
    p.grad = None
    p.grad_dtype = grad.dtype
    p.grad = grad


def deep_copied(p: Tensor, memo: dict[int, object]) -> Tensor:
    """Return a deep copy of a parameter that `has_other_dtype`, for which torch's own fails."""
    grad = p.grad
    assert grad is not None, "has_other_dtype"
    p.grad = None
    try:
        new = copy.deepcopy(p, memo)
    finally:
        p.grad = grad
    set_grad(new, copy.deepcopy(grad, memo))
    return new
