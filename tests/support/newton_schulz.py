# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz in float64."""

import numpy as np

USUAL = (3.4445, -4.7750, 2.0315)


def exact(matrix: np.ndarray, coefficients=USUAL, steps: int = 5, eps: float = 1e-7) -> np.ndarray:
    """Return what (N1) makes of one matrix."""
    a, b, c = coefficients
    x = matrix.astype(np.float64)
    x = x.T if matrix.shape[0] > matrix.shape[1] else x
    x = x / max(np.linalg.norm(x), eps)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x
