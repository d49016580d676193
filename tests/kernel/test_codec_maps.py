# SPDX-License-Identifier: Apache-2.0
"""The kernels' estimate of the nearest entry of a dynamic map, where it could be wrong."""

import ctypes
import re

import kernel_steps
import pytest
import torch
from places import SUPPORT
from segments import Place, assert_same, copied, make, moment_of, scalars_at
from test_csrc import COMPILER, CSRC, output_of

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


CASES = {
    "m at thresholds": lambda: neighbours(
        torch.cat([MAPS.of_signed.thresholds, -MAPS.of_signed.thresholds]), 600
    ),
    "v at thresholds": lambda: neighbours(MAPS.of_unsigned.thresholds.sqrt(), 600),
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
    text = (CSRC / f"step_{target}.cpp").read_text()
    chosen = re.search(r'GCC target\("([^"]*)"\)', text)
    command = [*COMPILER, *build.flags(), *(f"-m{name}" for name in chosen[1].split(","))]
    command += [f"-D{name}" for name in re.findall(r"^#define (\w+)$", text, re.MULTILINE)]
    header = re.search(r'#include "(vec_\w+\.h)"', text)[1]
    command += [f"-DTARGET={target}", f'-DHEADER="{header}"', "-shared", "-fvisibility=default"]
    path = tmp_path_factory.mktemp("nearest") / "nearest.so"
    output_of([*command, SUPPORT / "nearest_entries.cpp", "-o", path])
    library = ctypes.CDLL(str(path))
    library.count_wrong.restype = ctypes.c_int64

    def count(maps, begin, end):
        return library.count_wrong(ctypes.c_void_p(maps.ctypes.data), begin, end)

    return count


@pytest.mark.slow
def test_dynamic_codes_of_all_floats_are_those_of_the_nearest_entries(count_wrong):
    """From 0 to a little above 1, and negative ones: 3 * 2^30 floats."""
    assert count_wrong(codec_maps(), 0, 0x3F800040) == 0
