# SPDX-License-Identifier: Apache-2.0
"""The values of every map, for a figure: those of the paper, and of `log`."""

import torch
from torch import Tensor

from benchmarks.maps.codes import BLOCK_SIZE, LOG, LogPairCode
from benchmarks.maps.levels import MAPS
from zero8.spec.codec import CODECS
from zero8.spec.log import Octaves

WIDE = "log, 8 octaves"
"""The second set of levels that a block of m can have."""


def shown_maps(m: Tensor, v: Tensor) -> dict[str, dict]:
    """Return the values of each map by moment, as shares of the scale, and the ranges of `log`.

    Args:
        m: a first moment; its size is a multiple of the block size.
        v: the second moment.
    """
    m, v = m.reshape(-1, BLOCK_SIZE), v.reshape(-1, BLOCK_SIZE)
    values = {"m": {}, "v": {}}
    for moment, x in (("m", m), ("v", v)):
        normalized = x / x.abs().amax(1, keepdim=True).clamp(min=1e-38)
        for name, levels_of in MAPS.items():
            values[moment][name] = levels_of(normalized, moment == "m").tolist()
    state = LogPairCode().encode(m, v, 1)
    steps = state["v_scale"][:, 1]
    values["m"][LOG] = _octave_levels(CODECS[LOG].of_signed.narrow)
    values["m"][WIDE] = _octave_levels(CODECS[LOG].of_signed.wide)
    values["v"][LOG] = _log_levels(steps.median())
    octaves = 255 * steps / 16 / 2**23
    return values | {
        "log_ranges": {
            "wide_share": (state["m_scale"] < 0).float().mean().item(),
            "octaves_of_v": {
                str(share): octaves.quantile(share).item() for share in (0.05, 0.5, 0.95)
            },
        }
    }


def _octave_levels(octaves: Octaves) -> list[float]:
    """Return the 255 values of m, from -1 to 1."""
    magnitudes = octaves.levels[: octaves.largest + 1] / octaves.top
    return torch.cat([-magnitudes.flip(0)[:-1], magnitudes]).tolist()


def _log_levels(step: Tensor) -> list[float]:
    """Return the 256 values of v in a block whose largest element is 1."""
    scale = torch.stack([torch.ones(()), step]).expand(256, 2)
    return CODECS[LOG].of_unsigned.decode(torch.arange(256), scale, 1.0).tolist()
