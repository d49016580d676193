# SPDX-License-Identifier: Apache-2.0
"""The four moment codes, element by element; tests/spec/test_codec_blocks.py has whole blocks."""

import pytest
import torch
from processes import python

from zero8.spec import arithmetic as ieee
from zero8.spec import dither
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS, codec_named, codec_numbered
from zero8.spec.grid import BlockGrid
from zero8.spec.log import SignedLogCode

pytestmark = pytest.mark.usefixtures("one_torch_thread")
DYNAMIC = {
    which: CODECS["dynamic"].code_of(ADAM.moment(which)) for which in ("exp_avg", "exp_avg_sq")
}


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32).to(torch.int64)


def dithers(numel: int) -> dict[str, torch.Tensor | None]:
    """Nearest, the two extreme thresholds, and ordinary ones."""
    return {
        "nearest": None,
        "lowest": torch.zeros(numel, dtype=torch.int64),
        "highest": torch.full((numel,), 0xFFFF),
        "ordinary": dither.in_blocks(0x2468ACE0, 11, numel, BlockGrid(1, 2**40, 256)),
    }


# --- What all codes but v's of `log` do ----------------------------------------------------------


def signed(limit: int, bits: int = 8) -> torch.Tensor:
    """Return the codes from -limit to limit, in two's complement."""
    return (torch.arange(-limit, limit + 1) & (1 << bits) - 1).to(torch.uint8)


ALL = torch.arange(256, dtype=torch.uint8)
FP8 = {"m": torch.cat([ALL[:127], ALL[129:255]]), "v": ALL[:127]}
LOGS = {f"{name} m": CODECS[name].of_signed for name in ("log", "log6")}
LONG_LIVED = {f"{name} long-lived m": CODECS[name].of_dithered for name in ("log", "log6")}
# By name: the code, the codes that quantize makes, and scales.
CODES = {
    "dynamic m": (DYNAMIC["exp_avg"], ALL, [1.0, -1.0, 3.7e-20, -0.1, 2.0**126, 2.0**-104]),
    "dynamic v": (DYNAMIC["exp_avg_sq"], ALL, [1.0, 3.7e-20, 0.1, 2.0**126, 2.0**-104]),
    "fp8 m": (CODECS["fp8"].of_signed, FP8["m"], [1.0, 3.7e-20, 0.1, 2.0**117, 2.0**-117]),
    "fp8 v": (CODECS["fp8"].of_unsigned, FP8["v"], [1.0, 3.7e-20, 0.1, 2.0**117, 2.0**-117]),
    "linear4 m": (CODECS["linear4"].of_signed, ALL[:16], [1.0, -1.0, 3.7e-20, -0.1, 2.0**-118]),
    "linear4 v": (CODECS["linear4"].of_unsigned, ALL[:16], [1.0, 3.7e-20, 0.1, 2.0**126]),
    **{
        name: (code, signed(code.largest, code.bits), [1.0, -1.0, 3.7e-20, -0.1, 5.5e15])
        for name, code in LOGS.items()
    },
    **{
        name: (code, signed(code.largest, code.bits), torch.arange(1, 2, 2.0**-8).tolist())
        for name, code in LONG_LIVED.items()
    },
}
of_each_code = pytest.mark.parametrize(("code", "codes", "scales"), CODES.values(), ids=CODES)


def level_of(code, codes: torch.Tensor, is_wide: bool = False) -> torch.Tensor:
    """Return what codes decode to with a scale of 1, or -1 of the wide levels."""
    return code.decode(codes, torch.full(codes.shape, -1.0 if is_wide else 1.0), 1.0)


def usable(code, scale: float) -> float:
    """Return the nearest scale of which products are exact, where blocks have such alone."""
    if not hasattr(code, "TOP"):
        return scale
    return float(code.scales(torch.tensor([448 * scale]), torch.tensor([0]), 1))


@of_each_code
def test_encode_of_all_codes_returns_what_was_decoded(code, codes, scales):
    for scale in (usable(code, one) for one in scales):
        every = torch.full((len(codes),), scale)
        is_wide = scale < 0 and isinstance(code, SignedLogCode)
        x = code.decode(codes, every, 1.0)
        factor = every.abs() if is_wide else every
        exact = level_of(code, codes, is_wide).double() * factor.double()
        assert torch.equal(x, exact.float())
        for dithering, thresholds in dithers(len(codes)).items():
            assert torch.equal(code.encode(x, every, thresholds), codes), dithering


SETS = {name: (code, codes, False) for name, (code, codes, _) in CODES.items()}
SETS |= {f"{name}, wide": (code, CODES[name][1], True) for name, code in LOGS.items()}


@pytest.mark.parametrize(("code", "codes", "is_wide"), SETS.values(), ids=SETS)
def test_encode_at_every_boundary_is_nearest(code, codes, is_wide):
    """Two floats on either side of every level and of the middle of any two.

    A tie goes up, of magnitudes in `log`, and in `fp8` to the even code.  The scale is 1, so that
    the normalized value is x itself, or in `log` y = 1 + |x|, which is exact for the x = y - 1
    chosen here.  Distances between these float32 numbers are exact in binary64, so the brute-force
    search sees no rounding.
    """
    is_log, is_even = isinstance(code, SignedLogCode), hasattr(code, "TOP")
    if is_log or is_even:
        codes = codes[level_of(code, codes) >= 0]  # the others are their negatives
    shift = 1.0 if is_log else 0.0
    levels, order = level_of(code, codes, is_wide).sort()
    codes, levels = codes[order], levels.double() + shift
    y = torch.cat([(levels[:-1] + levels[1:]) / 2, levels]).float()
    for _ in range(2):
        y = torch.cat([y, y.nextafter(torch.tensor(999.0)), y.nextafter(torch.tensor(-999.0))])
    x = ieee.flush((torch.cat([y, 2 * y.max().view(1)]) - shift).unique())
    x = x if code.signed and not (is_log or is_even) else x[x >= 0]
    distance = (x.double() + shift)[:, None].sub(levels).abs()
    nearest = len(codes) - 1 - distance.flip(1).argmin(1)  # the last of equals
    if is_even:
        ties = (distance == distance.min(1, keepdim=True).values).sum(1) == 2
        assert ties.sum() == len(codes) - 1
        nearest -= (ties & (codes[nearest] % 2 == 1)).long()
    if not code.signed and level_of(code, codes[:1]) == 0:  # what is not 0 stays so
        nearest = torch.where(x > 0, nearest.clamp(min=1), nearest)
    assert len(x) >= 5 * (len(codes) - 1) - 2
    every = torch.full(x.shape, -1.0 if is_wide else 1.0)
    found = code.encode(x, every, None)
    assert torch.equal(found, codes[nearest])
    if code.signed and (is_log or is_even):
        negative = (-found.int() & (1 << code.bits) - 1) if is_log else found.int() | 128
        negative = torch.where(found == 0, 0, negative).to(torch.uint8)
        assert torch.equal(code.encode(-x, every, None), negative)


# --- Names, numbers and the dynamic maps ---------------------------------------------------------


def test_codec_names_and_numbers_are_stable():
    """Files carry the numbers."""
    numbers = {name: codec.number for name, codec in CODECS.items()}
    assert numbers == {"dynamic": 1, "log": 4, "log6": 6, "fp8": 5, "linear4": 7}
    assert all(codec_numbered(c.number) is codec_named(c.name) is c for c in CODECS.values())


DIGESTS = {
    "exp_avg": "7a41be4dec5751b2f74d84b4cf3d11ee02deb5117310bc4fe09cb5f33672fc4d",
    "exp_avg_sq": "7e15f8ee4fe74f82d32176562a54cb9bacd90aed834379f27aec96449b9e9a2e",
}
PRINT_DIGESTS = """
import hashlib
import torch
from zero8.spec.dynamic import dynamic_code
assert torch.backends.cpu.get_cpu_capability() == "DEFAULT"
for signed in (True, False):
    print(hashlib.sha256(dynamic_code(signed=signed).levels.numpy().tobytes()).hexdigest())
"""


@pytest.mark.parametrize("which", DIGESTS)
def test_dynamic_map_is_near_that_of_bitsandbytes(which):
    """Which computes it so, in float32."""
    entries = [torch.tensor([0.0, 1.0])]
    for decade in range(7):
        edges = torch.linspace(0.1, 1.0, 2 ** (decade + (which == "exp_avg_sq")) + 1)
        midpoints = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2.0
        entries += [midpoints, -midpoints] if which == "exp_avg" else [midpoints]
    theirs = torch.cat(entries).sort().values
    torch.testing.assert_close(DYNAMIC[which].entries, theirs, rtol=2.0**-20, atol=0.0)


def test_dynamic_map_is_the_same_where_torch_computes_without_fma():
    done = python(PRINT_DIGESTS, ATEN_CPU_CAPABILITY="default")
    assert done.stdout.split() == list(DIGESTS.values()), done.stderr
