# SPDX-License-Identifier: Apache-2.0
"""Clipping by the norm of all gradients, whose factor the step applies as it reads them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from zero8.environment import numbers
from zero8.op import norm

CHANGED = (
    "gradients have changed since clip_grad_norm_(), whose factor was for those before: call it "
    "after the last backward and right before step()"
)


class Clipped:
    """The gradients that a factor was computed for."""

    def __init__(self, grads: Sequence[Tensor]):
        """Note them as they are now, without keeping them alive."""
        self._noted = [(ref(grad), grad._version) for grad in grads]

    def are_there(self, grads: Sequence[Tensor]) -> bool:
        """Return whether the gradients are the noted ones; False if these are gone.

        Raises RuntimeError if some are gone, or have been written to.
        """
        before = [(noted(), version) for noted, version in self._noted]
        if all(grad is None for grad, _ in before):
            return False
        now = [(grad, grad._version) for grad in grads]
        if len(now) != len(before) or any(
            grad is not noted or version != its_version
            for (grad, version), (noted, its_version) in zip(now, before, strict=True)
        ):
            raise RuntimeError(CHANGED)
        return True


class GradFactor:
    """The factor of the gradients of the next step.

    Attributes:
        value: the factor, 1 for gradients as they are.
        meant: the gradients that it is for, None if for whichever come.
    """

    def __init__(self) -> None:
        """Take gradients as they are."""
        self.value = 1.0
        self.meant: Clipped | None = None

    def set(self, value: float, meant: Clipped | None = None) -> None:
        """Set the factor, for certain gradients only or for whichever come."""
        self.value, self.meant = value, meant

    def forget(self) -> None:
        """Take the next step's gradients as they are."""
        self.set(1.0)

    def check(self, grads: Sequence[Tensor]) -> None:
        """Forget a factor that was for gradients which are gone; raises as `Clipped`."""
        meant, value = self.meant, self.value
        self.forget()
        if meant is None or meant.are_there(grads):
            self.value = value


def total_norm(parts: Mapping[tuple[numbers.Group, ...], Sequence[Tensor]]) -> Tensor:
    """Return the 2-norm of all gradients, each read once; 0-d float32 on the CPU.

    It is within 2^-23 of the exact norm, relatively, for any number of threads.  All ranks must
    call this with the same groups, over which sums are added, in the same order.
    """
    squares = (numbers.total(norm.sum_of_squares(grads), groups) for groups, grads in parts.items())
    return torch.tensor(math.sqrt(math.fsum(squares)), dtype=torch.float32)


def factor_of(max_norm: float, total_norm: Tensor) -> float:
    """Return the factor by which `torch.nn.utils.clip_grads_with_norm_` multiplies gradients."""
    norm = total_norm.full_tensor() if hasattr(total_norm, "full_tensor") else total_norm
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


PartsOf = Callable[[Iterable[Tensor]], dict[tuple[numbers.Group, ...], list[Tensor]]]
"""Returns this rank's parts of the gradients of parameters, as `total_norm` takes them."""


def norm_and_factor(
    params: Sequence[Tensor],
    parts_of: PartsOf,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> tuple[Tensor, float | None]:
    """Return the norm of all gradients, and the factor that clips it; None if that is done.

    The arguments after the second are those of `torch.nn.utils.clip_grad_norm_`.
    """
    is_on_gpu = any(p.is_cuda for p in params)
    if is_on_gpu or float(norm_type) != 2.0:
        grads = [p.grad for p in params if p.grad is not None]
        total = torch.nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    else:
        total = total_norm(parts_of(params))
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                "clip_grad_norm_: the norm of the gradients is not finite; with "
                "error_if_nonfinite=False they are scaled by it"
            )
    if is_on_gpu:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach)
        return total, None
    return total, float(np.float32(factor_of(float(max_norm), total)))
