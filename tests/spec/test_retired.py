# SPDX-License-Identifier: Apache-2.0
"""Codes of format 1: states that were written with them decode to what they always did."""

import hashlib

import pytest
import torch

from zero8.algorithms.adam import ADAM
from zero8.spec.codec import RETIRED, dequantize

SCALES = {
    "exp_avg": [0.37, -0.37, 2.0**-100, -3.7e20],
    "exp_avg_sq": [
        [1.7, 14 * 2.0**23 / 254],
        [0.3, 8.3 * 2.0**23 / 254],
        [2.0**-60, 2.0**23 / 17],  # reaches below 2^-63
        [3e18, 2.0**23 / 254],
    ],
}


@pytest.mark.parametrize(
    ("which", "digest"),
    [
        ("exp_avg", "a25304c90e8ae8db6c89d988fd3a5eb8fb73c17927a35aa038c2c56a2fb7b094"),
        ("exp_avg_sq", "32108fcad60d190c19e4fc54ef99376367b1c648363b2bc8c3f482d2f9768825"),
    ],
)
def test_dequantize_retired_code_equals_that_of_format_1(which, digest):
    """All codes under four scales; the digests are of zero8 at 685ad13, with zeros positive."""
    codes, block = torch.arange(256, dtype=torch.uint8).repeat(4), torch.arange(4)
    code, scales = RETIRED.code_of(ADAM.moment(which)), torch.tensor(SCALES[which])
    decoded = dequantize(code, codes, scales, block.repeat_interleave(256)) + 0.0
    assert decoded.dtype == torch.float32
    assert hashlib.sha256(decoded.numpy().tobytes()).hexdigest() == digest


def test_dequantize_retired_code_gain_multiplies_the_second_moment():
    """Steps of an eighth of an octave: code 64 is 8 octaves below the largest root."""
    code, codes = RETIRED.of_unsigned, torch.tensor([0, 64, 255], dtype=torch.uint8)
    scales, block = torch.tensor([[1.5, 2.0**20]]), torch.zeros(3, dtype=torch.int64)
    decoded = dequantize(code, codes, scales, block, 0.5)
    assert decoded.tolist() == [0.5 * 1.5**2, 0.5 * 1.5**2 * 2.0**-16, 0.0]
