# SPDX-License-Identifier: Apache-2.0
"""The orthogonalized update of Muon (Jordan et al., 2024), and the matrices that Muon trains."""

from collections.abc import Sequence

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
LEAST_NORM = 1e-7


def is_hidden(name: str, shape: Sequence[int]) -> bool:
    """Return whether a parameter of the GPT is a matrix of a hidden layer.

    The output layer has the token embedding's weight.
    """
    return len(shape) == 2 and "embedding" not in name


def orthogonalized(update: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a matrix with the singular vectors of `update` and singular values near 1; float32.

    Newton-Schulz iterations, with X = update / max(norm, 1e-7), wider than high:

        A = X X^T,   X' = a X + (b A + c A A) X

    Args:
        update: a matrix, float32.
        dtype: of all products.
    """
    a, b, c = COEFFICIENTS
    is_high = update.shape[0] > update.shape[1]
    x = (update.T if is_high else update).to(dtype)
    x = x / x.norm().clamp(min=LEAST_NORM)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if is_high else x).float()


def median_singular_value(update: Tensor) -> float:
    """Return the median singular value of a matrix over its norm; 1/sqrt(rank) if all are equal."""
    return (torch.linalg.svdvals(update).median() / update.norm()).item()


def angle_deg(one: Tensor, other: Tensor) -> float:
    """Return the angle between two matrices as vectors, in degrees.

    Kahan's formula, 2 atan(|a - b| / |a + b|) of unit vectors, also holds for small angles, whose
    cosine rounds to 1.
    """
    a, b = (x.double() / x.double().norm() for x in (one, other))
    return torch.rad2deg(2 * torch.atan2((a - b).norm(), (a + b).norm())).item()
