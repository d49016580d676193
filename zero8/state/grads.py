# SPDX-License-Identifier: Apache-2.0
"""Gradients of another dtype than their parameter's: torch's `grad_dtype` allows them."""

import copy

from torch import Tensor


def has_other_dtype(p: Tensor) -> bool:
    """Return whether a parameter has a gradient of another dtype than its own."""
    return p.grad is not None and p.grad.dtype != p.dtype


def set_grad(p: Tensor, grad: Tensor) -> None:
    """Set the gradient of a parameter, whatever its dtype if torch has `grad_dtype`."""
    p.grad = None
    if hasattr(Tensor, "grad_dtype"):
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
