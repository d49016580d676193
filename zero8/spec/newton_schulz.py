# SPDX-License-Identifier: Apache-2.0
"""Orthogonalized matrices, by the Newton-Schulz iteration of Muon.

Keller Jordan (2024), "Muon: An optimizer for hidden layers in neural networks".  With X the matrix
divided by its Frobenius norm, transposed if it has more rows than columns, each step is

    A = X X^T,   X' = a X + (b A + c A A) X                                                    (N1)

After 5 steps with the usual coefficients the singular values lie between 0.68 and 1.21, but for
those below about 0.003 of the norm, which are smaller: X is near U V^T of X = U S V^T, and not
equal to it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""a, b and c of (N1), as in `torch.optim.Muon`."""

SKIPPED = 3e38
"""An element that has no update: it makes the norm of its matrix infinite, and so all of it NaN."""


def orthogonalized(
    matrices: Tensor,
    coefficients: Sequence[float] = COEFFICIENTS,
    steps: int = 5,
    eps: float = 1e-7,
) -> Tensor:
    """Return orthogonalized matrices, by (N1) in their dtype; (matrices, rows, columns).

    `coefficients` are a, b, c, `eps` the least norm that matrices are divided by.  A matrix with a
    norm that is not finite is NaN throughout.
    """
    a, b, c = coefficients
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if is_tall else matrices
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.float32)
    # The difference is 0, or NaN: a division by infinity would give 0.  The square overflows also
    # where the norm is that of one element.
    square = norm * norm
    x = x / (norm.clamp(min=eps) + (square - square)).to(x.dtype)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, factor, x, beta=a)
    return x.mT if is_tall else x
