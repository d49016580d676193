# SPDX-License-Identifier: Apache-2.0
"""Orthogonalized matrices: equation (N1), its singular values, and what makes it NaN."""

import newton_schulz
import numpy as np
import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from zero8.spec.newton_schulz import COEFFICIENTS, SKIPPED, orthogonalized

pytestmark = pytest.mark.usefixtures("one_torch_thread")
FP32, BF16 = torch.float32, torch.bfloat16
SHAPES = {"wide": (1, 8, 24), "tall": (1, 24, 8), "square": (1, 12, 12), "batch": (5, 7, 10)}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
dtypes = pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@shapes
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_orthogonalized_follows_float64(shape, steps):
    """Five steps multiply an error by up to 3.4^5 < 2^9, and a rounding is 2^-24."""
    x = random(*shape)
    for got, matrix in zip(orthogonalized(x, steps=steps), x, strict=True):
        expected = newton_schulz.exact(matrix.numpy(), steps=steps)
        assert np.linalg.norm(got.numpy() - expected) <= 1e-4 * np.linalg.norm(expected)


def test_orthogonalized_takes_coefficients_and_the_least_norm():
    """Norms below eps are divided by eps."""
    x, coefficients, eps = random(1, 6, 9), (1.5, -0.5, 0.25), 100.0
    (got,) = orthogonalized(x, coefficients, 2, eps)
    expected = newton_schulz.exact(x[0].numpy(), coefficients, 2, eps)
    assert np.linalg.norm(got.numpy() - expected) <= 1e-4 * np.linalg.norm(expected)


@pytest.mark.parametrize("shape", [(1, 24, 64), (1, 64, 24), (1, 40, 40)], ids=str)
def test_orthogonalized_in_bfloat16_is_as_near_as_torchs(shape):
    """Both round the same numbers as often, to the same precision; torch the norm besides.

    So the errors have one distribution.  Theirs are sums over 1,500 elements, whose sizes do not
    differ by a factor of 2.
    """
    x = random(*shape).to(BF16)
    expected = newton_schulz.exact(x[0].double().numpy())
    theirs = _zeropower_via_newtonschulz(x[0], COEFFICIENTS, 5, 1e-7)
    ours = orthogonalized(x)[0]
    assert ours.dtype == BF16 and ours.shape == theirs.shape
    error, torchs = (np.linalg.norm(o.double().numpy() - expected) for o in (ours, theirs))
    assert error <= 2 * torchs < np.linalg.norm(expected) / 5


@dtypes
@pytest.mark.parametrize("shape", [(3, 8, 24), (3, 24, 8), (3, 1, 1), (3, 200, 300)], ids=str)
def test_orthogonalized_matrix_with_a_skipped_element_is_nan_and_its_neighbours_are_not(
    shape, dtype
):
    x = random(*shape).to(dtype)
    expected = orthogonalized(x)
    assert expected.isfinite().all()
    x[1, -1, 0] = SKIPPED
    got = orthogonalized(x)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2]], expected[[0, 2]])


@dtypes
def test_orthogonalized_zeros_are_zeros(dtype):
    x = random(3, 8, 24).to(dtype)
    x[1] = 0.0
    got = orthogonalized(x)
    assert (got[1] == 0).all() and (got[0] != 0).any()
