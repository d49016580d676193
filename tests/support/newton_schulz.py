# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz in float64, and how far the same in float32 can be from it."""

import numpy as np
from small_optimizers import gamma

USUAL = (3.4445, -4.7750, 2.0315)


def exact(matrix: np.ndarray, coefficients=USUAL, steps: int = 5, eps: float = 1e-7) -> np.ndarray:
    """Return what (N1) makes of one matrix."""
    return with_bound(matrix, 0.0, coefficients, steps, eps)[0]


def with_bound(
    matrix: np.ndarray,
    matrix_error: float = 0.0,
    coefficients=USUAL,
    steps: int = 5,
    eps: float = 1e-7,
) -> tuple[np.ndarray, float]:
    """Return what (N1) makes of one matrix in float64, and a bound on float32's distance from it.

    In the Frobenius norm, thus of each element too.  With f(s) = a s + b s^3 + c s^5, (N1) maps
    each singular value s of X to f(s), and the derivative of such a map has the largest divided
    difference of f for its norm, which is |f'| somewhere between.  So an error E of X becomes at
    most L E, L being the largest |f'| up to the largest singular value and E.  To that come the
    roundings of the step itself, on magnitudes of at most Y = |X| + E, where a sum of n products
    has the error gamma(n) of the sum of their magnitudes, in any order:

        dA = gamma(n) Y Y^T,     A' = Y Y^T + dA
        dF = |b| dA + 2 |c| A' dA + gamma(r+3) F',     F' = |b| A' + |c| A' A'
        E' = L E + | dF Y + gamma(r+3) (|a| Y + (F' + dF) Y) |

    r and n are the rows and columns, r <= n; the coefficients are rounded too, and float64 has its
    own errors, for which each gamma counts one more.  The norm of rn squares, its root and the
    division make gamma(rn + 4) at first; an error of the matrix counts twice, as it moves the norm.

    Args:
        matrix: (rows, columns).
        matrix_error: of the matrix that float32 had, in the Frobenius norm.
        coefficients: a, b, c.
        steps: the number of steps.
        eps: the least norm that the matrix is divided by.
    """
    a, b, c = coefficients
    x = matrix.astype(np.float64)
    if is_tall := x.shape[0] > x.shape[1]:
        x = x.T
    r, n = x.shape
    norm = max(np.sqrt((x * x).sum()), eps)
    x = x / norm
    error = 2 * matrix_error / norm + gamma(r * n + 5)
    for _ in range(steps):
        top = np.linalg.norm(x, 2) + error
        s = np.linspace(0, top, 10001)
        curvature = abs(6 * b * top) + abs(20 * c * top**3)  # of f, between two points of s
        lipschitz = np.abs(a + 3 * b * s**2 + 5 * c * s**4).max() + curvature * top / 10000
        y = np.abs(x) + error
        gram_error = gamma(n + 1) * (y @ y.T)
        gram = y @ y.T + gram_error
        factor = abs(b) * gram + abs(c) * gram @ gram
        factor_error = abs(b) * gram_error + 2 * abs(c) * gram @ gram_error
        factor_error += gamma(r + 4) * factor
        added = factor_error @ y + gamma(r + 4) * (abs(a) * y + (factor + factor_error) @ y)
        error = lipschitz * error + np.linalg.norm(added)
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return (x.T if is_tall else x), float(error)
