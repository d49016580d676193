# SPDX-License-Identifier: Apache-2.0
"""Clipping by the norm of all gradients, whose factor the step applies as it reads them."""

import math
from collections.abc import Mapping, Sequence
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from zero8.environment import ranks
from zero8.op.kernel import module
from zero8.op.structs import DTYPE_NUMBERS, NUMBERS
from zero8.op.threads import alive
from zero8.state.fsdp import parts_of_grads

DTYPES = (torch.float32, torch.bfloat16)
"""Of gradients whose squares the kernel sums."""
CHANGED = (
    "gradients have changed since clip_grad_norm_(), whose factor was for those before: call it "
    "after the last backward and right before step()"
)


class GradFactor:
    """The factor of the gradients of the next step.

    Attributes:
        value: the factor, 1 for gradients as they are.
        meant: the gradients that it is for as they were, None if for whichever come.
    """

    def __init__(self, value: float = 1.0):
        """Take whichever gradients come."""
        self.set(value)

    def set(self, value: float, grads: Sequence[Tensor] | None = None) -> None:
        """Set the factor, for certain gradients only, which it does not keep alive, or for all."""
        self.value = value
        self.meant = None if grads is None else [(ref(one), one._version) for one in grads]

    def check(self, grads: Sequence[Tensor]) -> None:
        """Forget a factor that was for gradients which are gone.

        Raises RuntimeError if only some of them are, or some have been written to.
        """
        value, before = self.value, [(noted(), version) for noted, version in self.meant or ()]
        self.set(1.0)
        if all(grad is None for grad, _ in before):
            return
        now = [(id(grad), grad._version) for grad in grads]
        if now != [(id(grad), version) for grad, version in before]:
            raise RuntimeError(CHANGED)
        self.value = value


def total_norm(parts: Mapping[tuple[ranks.Group, ...], Sequence[Tensor]]) -> Tensor:
    """Return the 2-norm of all gradients, each read once; 0-d float32 on the CPU.

    It is within 2^-23 of the exact norm, relatively, for any number of threads.  All ranks must
    call this with the same groups, over which sums are added, in the same order.
    """
    squares = (ranks.total(sum_of_squares(grads), groups) for groups, grads in parts.items())
    return torch.tensor(math.sqrt(math.fsum(squares)), dtype=torch.float32)


def sum_of_squares(grads: Sequence[Tensor], num_threads: int | None = None) -> float:
    """Return the sum of squares of gradients on the CPU, in double precision.

    The bits do not depend on the number of threads; the relative error is below 2^-40.
    """
    # torch reads gradients with gaps in memory, and of other dtypes.
    served: list[Tensor] = []
    others: list[Tensor] = []
    for grad in grads:
        (served if _is_served(grad) else others).append(grad)
    records = np.zeros(len(served), NUMBERS)
    records["data"] = [grad.data_ptr() for grad in served]
    records["numel"] = [grad.numel() for grad in served]
    records["dtype"] = [DTYPE_NUMBERS[grad.dtype] for grad in served]
    total: float = module().sum_of_squares(records, alive(num_threads))
    return total + math.fsum(float(grad.double().square().sum()) for grad in others)


def _is_served(grad: Tensor) -> bool:
    if grad.layout != torch.strided or grad.dtype not in DTYPES:
        return False
    # Whether its elements fill a range of memory, each once, in whatever order.
    return grad.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(grad)


def factor_of(max_norm: float, total_norm: Tensor) -> float:
    """Return the factor by which `torch.nn.utils.clip_grads_with_norm_` multiplies gradients."""
    norm = total_norm.full_tensor() if hasattr(total_norm, "full_tensor") else total_norm
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def norm_and_factor(
    params: Sequence[Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> tuple[Tensor, float | None]:
    """Return the norm of all gradients, and the factor that clips it; None if that is done.

    The arguments are those of `torch.nn.utils.clip_grad_norm_`.
    """
    is_on_gpu = any(p.is_cuda for p in params)
    if is_on_gpu or float(norm_type) != 2.0:
        grads = [p.grad for p in params if p.grad is not None]
        total = torch.nn.utils.get_total_norm(grads, norm_type, error_if_nonfinite, foreach)
    else:
        total = total_norm(parts_of_grads(params))
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                "clip_grad_norm_: the norm of the gradients is not finite; with "
                "error_if_nonfinite=False they are scaled by it"
            )
    if is_on_gpu:
        torch.nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach)
        return total, None
    return total, float(np.float32(factor_of(float(max_norm), total)))
