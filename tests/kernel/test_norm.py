# SPDX-License-Identifier: Apache-2.0
"""The sum of squares of gradients: its value, for any number of threads and any layout."""

import math

import pytest
import torch

from zero8.optimizer import clipping

CHUNK_NUMEL = 1 << 16
SIZES = {
    "none": [],
    "empty": [0],
    "tails": [1, 15, 16, 17, 0, 31, 33],
    "chunks": [CHUNK_NUMEL - 1, CHUNK_NUMEL, CHUNK_NUMEL + 1, 3 * CHUNK_NUMEL + 5],
}


def gradients(sizes, dtype):
    """Return gradients from the smallest subnormals to the largest numbers."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for size in sizes:
        sizes_of_values = torch.exp2(torch.randint(-149, 127, (size,), generator=generator).float())
        found.append((torch.randn(size, generator=generator) * sizes_of_values).to(dtype))
    return found


def exact(grads):
    return math.fsum(float(x) ** 2 for grad in grads for x in grad.double().flatten().tolist())


@pytest.mark.parametrize("dtype", clipping.DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES)
def test_sum_of_squares_is_exact_to_2_to_the_minus_40(sizes, dtype):
    """A lane adds 4096 squares, each rounding once: 2^12 x 2^-53; and few chunks are added."""
    grads = gradients(SIZES[sizes], dtype)
    expected = exact(grads)
    assert abs(clipping.sum_of_squares(grads) - expected) <= 2**-40 * expected
    assert expected > 0 or sizes in ("none", "empty")


@pytest.mark.parametrize("dtype", clipping.DTYPES, ids=str)
def test_sum_of_squares_has_the_same_bits_for_any_number_of_threads(dtype):
    grads = gradients(SIZES["chunks"] + SIZES["tails"], dtype)
    assert len({clipping.sum_of_squares(grads, threads) for threads in (1, 2, 3, 7)}) == 1


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 17, CHUNK_NUMEL])
def test_sum_of_squares_of_a_number_that_is_not_finite_is_not(bad, place):
    grad = torch.ones(CHUNK_NUMEL + 1)
    grad[place] = bad
    total = clipping.sum_of_squares([grad])
    assert math.isnan(total) if math.isnan(bad) else total == math.inf


@pytest.mark.parametrize(
    ("grad", "is_served"),
    [
        (torch.ones(3, 4), True),
        (torch.ones(3, 4).t(), True),
        (torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.ones(4, 1, 3).transpose(0, 2), True),
        (torch.ones(0, 3), True),
        (torch.ones(3, 8)[:, ::2], False),
        (torch.ones(3, 1).expand(3, 4), False),
        (torch.ones(16).as_strided((4, 4), (2, 3)), False),
        (torch.ones(3).double(), False),
        (torch.ones(3).half(), False),
    ],
    ids=lambda one: str(one) if isinstance(one, bool) else "",
)
def test_sum_of_squares_has_every_element_once_in_any_layout(grad, is_served):
    assert clipping._is_served(grad) is is_served
    assert clipping.sum_of_squares([grad, torch.ones(5)]) == grad.numel() + 5
