# SPDX-License-Identifier: Apache-2.0
"""The kernels' estimate of the nearest entry of a dynamic map, where it could be wrong."""

import ctypes

import kernel_steps
import numpy as np
import pytest
import torch
from segments import Place, assert_same, copied, make, moment_of, scalars_at
from test_vec import compiled

from zero8.op import build, kernel
from zero8.op.codec_maps import codec_maps
from zero8.spec import reference
from zero8.spec.codec import CODECS

pytestmark = pytest.mark.usefixtures("one_torch_thread")
MAPS = CODECS["dynamic"]
# Both moments are those of the last gradient: m' = g and v' = g^2.
NO_MEMORY = {"lr": 0.0, "betas": (0.0, 0.0), "eps": 1e-8, "weight_decay": 0.0}


def neighbours(x: torch.Tensor, ulps: int) -> torch.Tensor:
    """Return all floats within so many units in the last place, except beyond 1."""
    bits = x.view(torch.int32)[:, None] + torch.arange(-ulps, ulps + 1, dtype=torch.int32)
    # Patterns below that of 0 are NaN.
    return bits.view(torch.float32).flatten().nan_to_num(0.0).clamp(-1.0, 1.0)


def edges() -> torch.Tensor:
    """Return the ends of the pieces: decades, and octaves, where the tables change."""
    decades = torch.tensor([10.0**-k for k in range(8)])
    octaves = torch.tensor([2.0**-k for k in range(34)])
    return torch.cat([decades, octaves])


CASES = {
    "m at thresholds": lambda: neighbours(MAPS.of_signed.thresholds, 600),
    "m at mirrored thresholds": lambda: neighbours(-MAPS.of_signed.thresholds, 600),
    "v at thresholds": lambda: neighbours(MAPS.of_unsigned.thresholds.sqrt(), 600),
    "at the ends of pieces": lambda: neighbours(torch.cat([edges(), -edges()]), 600),
    "at levels": lambda: neighbours(
        torch.cat([MAPS.of_signed.levels, MAPS.of_unsigned.levels]), 600
    ),
    "anywhere": lambda: 2 * torch.rand(1_000_000, generator=torch.Generator().manual_seed(1)) - 1,
    "any magnitude": lambda: (
        torch.rand(1_000_000, generator=torch.Generator().manual_seed(2)).mul(-24).exp()
        * torch.randn(1_000_000, generator=torch.Generator().manual_seed(3)).sign()
    ),
}


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_dynamic_codes_equal_the_exact_nearest_entry(values):
    """Every block of 256 begins with 1, so that its scale is 1 and values are what they are."""
    values = values()
    blocks = -(-values.numel() // 255)
    grad = torch.zeros(blocks, 256)
    grad[:, 0] = 1.0
    grad[:, 1:] = torch.nn.functional.pad(values, (0, blocks * 255 - values.numel())).view(-1, 255)
    place = Place((blocks, 256), 256, 0, grad.numel())
    wanted = make("dynamic", place, scalars_at(1, NO_MEMORY))
    wanted.grad.copy_(grad.flatten())
    start = copied(wanted)
    reference.step(wanted)
    assert moment_of(wanted, "exp_avg").scales.unique().tolist() == [1.0]
    for isa in kernel.isas():
        segment = copied(start)
        kernel_steps.step([segment], isa=isa)
        assert_same(segment, wanted, isa)


@pytest.fixture(scope="module")
def count_wrong(tmp_path_factory):
    """How many floats with patterns from a range the fastest encoders give another code."""
    target = list(kernel.isas())[-1]
    folder = tmp_path_factory.mktemp("nearest")
    library = compiled(target, folder, source="nearest_entries.cpp", flags=build.flags())
    library.count_wrong.restype = ctypes.c_int64

    def count(maps, begin, end):
        return library.count_wrong(ctypes.c_void_p(maps.ctypes.data), begin, end)

    return count


@pytest.mark.slow
def test_dynamic_codes_of_all_floats_are_those_of_the_nearest_entries(count_wrong):
    """From 0 to a little above 1, and negative ones: 3 * 2^30 floats."""
    assert count_wrong(codec_maps(), 0, 0x3F800040) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("field", "error"), [("slope", 1e-4), ("offset", 1e-4), ("joint", 1e-3)])
@pytest.mark.parametrize("which", ["of_signed", "of_unsigned"])
def test_dynamic_codes_by_wrong_tables_are_found(count_wrong, which, field, error):
    """Guards the test above."""
    maps = codec_maps().copy()
    assert count_wrong(maps, 0x3D000000, 0x3F800040) == 0
    table = maps[which][field]
    table += (np.ceil(table * error)).astype(table.dtype)
    assert count_wrong(maps, 0x3D000000, 0x3F800040) > 0


def test_dynamic_codes_decode_to_their_levels():
    """All 256 codes at all places of a chunk: a step that forgets nothing leaves them as they were.

    Both betas are the float32 below 1, which moves no value out of its code.
    """
    place = Place((64, 257), 512, 0, 64 * 257)
    keep = {"lr": 0.0, "betas": (1.0 - 2**-24, 1.0 - 2**-24), "eps": 1e-8, "weight_decay": 0.0}
    segment = make("dynamic", place, scalars_at(1, keep))
    codes = torch.arange(place.numel, dtype=torch.int64).mul(7) % 256
    for moment, code in zip(segment.moments, (MAPS.of_signed, MAPS.of_unsigned), strict=True):
        kept = codes.clone()
        kept.view(64, 257)[:, 5] = 255  # the entry 1.0, for which the scale stands
        if not code.signed:
            kept.clamp_(min=1)
        moment.values.copy_(kept)
        moment.scales.fill_(1.0)
    for isa in kernel.isas():
        after = copied(segment)
        kernel_steps.step([after], isa=isa)
        assert torch.equal(
            moment_of(after, "exp_avg").values, moment_of(segment, "exp_avg").values
        ), isa
        assert torch.equal(
            moment_of(after, "exp_avg_sq").values, moment_of(segment, "exp_avg_sq").values
        ), isa
