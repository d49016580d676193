# SPDX-License-Identifier: Apache-2.0
"""States in the layout of bitsandbytes: flat blocks of 256, positive scales."""

import pytest
import torch
from small_optimizers import param, run

from zero8 import Adam8bitBlockwise
from zero8.checkpoint.read.foreign import BLOCK_SIZE, from_foreign, to_bitsandbytes
from zero8.spec.codec import CODECS

# Rows, and groups of rows, that are blocks; and that lie across them.
COINCIDE, DIFFER = [(24, 512), (900, 8)], [(50, 300), (500, 12)]


def exported(shape, codec="dynamic"):
    """Return the moments of a parameter, and its state in bitsandbytes' layout."""
    p = param(*shape)
    optimizer = Adam8bitBlockwise([p], codec=codec)
    run(optimizer, [p], 3)
    moments = [store.read(0, p.numel()) for store in optimizer.moments(p)]
    return moments, to_bitsandbytes(optimizer.state_dict())


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("shape", [*COINCIDE, *DIFFER], ids=str)
def test_export_is_within_half_a_code_and_its_import_exact_where_blocks_coincide(codec, shape):
    """Half the largest gap of the map, of the flat block's extreme, and roundings."""
    moments, state_dict = exported(shape, codec)
    p = torch.nn.Parameter(torch.zeros(shape))
    again = Adam8bitBlockwise([p], codec="dynamic")
    again.load_state_dict(from_foreign(state_dict))
    assert again.state[p]["step"] == 3
    (state,), block = state_dict["state"].values(), torch.arange(p.numel()) // BLOCK_SIZE
    for number, (ours, loaded) in enumerate(zip(moments, again.moments(p), strict=True), 1):
        codes, absmax, levels = (state[f"{key}{number}"] for key in ("state", "absmax", "qmap"))
        assert bool((absmax >= 0).all())
        theirs = levels[codes.flatten().long()] * absmax[block]
        half_gap = levels.diff().max() / 2
        assert bool(((theirs - ours).abs() <= (half_gap + 2**-23) * absmax[block]).all())
        if shape in COINCIDE:
            assert torch.equal(loaded.codes, codes.flatten())
            assert torch.equal(loaded.scales.flatten(), absmax)
            assert torch.equal(loaded.read(0, p.numel()), theirs)


def test_export_of_a_small_parameter_has_its_float32_moments():
    moments, state_dict = exported((8, 8))
    (state,) = state_dict["state"].values()
    for number, ours in enumerate(moments, 1):
        assert torch.equal(state[f"state{number}"].flatten(), ours)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("qmap1", torch.linspace(-1, 1, 256), "exp_avg: .*map"),
        ("absmax1", torch.ones(1), "exp_avg: got 1 scales"),
        ("absmax2", None, "exp_avg_sq: got float32, expected .* as exp_avg has"),
    ],
)
def test_import_of_another_map_or_of_tensorwise_scales_is_refused(key, value, words):
    _, state_dict = exported(COINCIDE[0])
    state_dict["state"][0][key] = value
    with pytest.raises(ValueError, match=words):
        from_foreign(state_dict)
