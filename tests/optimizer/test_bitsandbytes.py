# SPDX-License-Identifier: Apache-2.0
"""States of bitsandbytes, made here in its layout: flat blocks of 256, positive scales."""

import pytest
import torch

from zero8 import Adam8bitBlockwise
from zero8.checkpoint.read.foreign import BLOCK_SIZE, from_foreign, to_bitsandbytes
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS

DYNAMIC = CODECS["dynamic"]
# Rows, and groups of rows, that are blocks; and that lie across them.
COINCIDE, DIFFER = [(24, 512), (900, 8)], [(50, 300), (500, 12)]


def their_state(shape):
    """Return a state as bitsandbytes keeps it, and its moments."""
    generator = torch.Generator().manual_seed(0)
    numel = torch.Size(shape).numel()
    block = torch.arange(numel) // BLOCK_SIZE
    state, moments = {"step": 17}, {}
    for number, which in enumerate(("exp_avg", "exp_avg_sq"), 1):
        code = DYNAMIC.code_of(ADAM.moment(which))
        codes = torch.randint(0, 256, (numel,), generator=generator, dtype=torch.uint8)
        absmax = torch.rand(int(block[-1]) + 1, generator=generator) + 0.01
        moments[which] = (code.levels[codes.long()] * absmax[block]).view(shape)
        state |= {
            f"state{number}": codes.view(shape),
            f"absmax{number}": absmax,
            f"qmap{number}": code.levels.clone(),
        }
    return state, moments


def state_dict_of(state):
    group = {"params": [0], "lr": 1e-3, "betas": (0.9, 0.99)}
    return {"state": {0: state}, "param_groups": [group]}


def dense(optimizer, p, which):
    stores = optimizer.moments(p)
    return {store.name: store for store in stores}[which].read(0, p.numel()).view(p.shape)


@pytest.mark.parametrize("shape", COINCIDE, ids=str)
def test_import_where_blocks_coincide_is_verbatim(shape):
    state, moments = their_state(shape)
    p = torch.nn.Parameter(torch.zeros(shape))
    optimizer = Adam8bitBlockwise([p], codec="dynamic")
    optimizer.load_state_dict(from_foreign(state_dict_of(state)))
    ours = optimizer.state[p]
    assert ours["step"] == 17
    for number, which in enumerate(("exp_avg", "exp_avg_sq"), 1):
        assert torch.equal(ours[f"{which}_q8"], state[f"state{number}"])
        assert torch.equal(ours[f"{which}_scale"].flatten(), state[f"absmax{number}"])
        assert torch.equal(dense(optimizer, p, which), moments[which])


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("shape", [*COINCIDE, *DIFFER], ids=str)
def test_export_of_trained_states_is_within_half_a_code(codec, shape):
    """Half the largest gap of the map, of the flat block's extreme, and roundings: as above."""
    torch.manual_seed(1)
    p = torch.nn.Parameter(torch.zeros(shape))
    optimizer = Adam8bitBlockwise([p], codec=codec)
    for _ in range(3):
        p.grad = torch.randn(shape)
        optimizer.step()
    (exported,) = to_bitsandbytes(optimizer.state_dict())["state"].values()
    block = torch.arange(p.numel()) // BLOCK_SIZE
    for number, which in enumerate(("exp_avg", "exp_avg_sq"), 1):
        absmax = exported[f"absmax{number}"]
        assert bool((absmax >= 0).all())
        theirs = exported[f"qmap{number}"][exported[f"state{number}"].flatten().long()]
        theirs = theirs * absmax[block]
        ours = dense(optimizer, p, which).flatten()
        half_gap = exported[f"qmap{number}"].diff().max() / 2
        assert bool(((theirs - ours).abs() <= (half_gap + 2**-23) * absmax[block]).all())


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("qmap1", torch.linspace(-1, 1, 256), "exp_avg: .*map"),
        ("absmax1", torch.ones(1), "exp_avg: got 1 scales"),
    ],
)
def test_import_of_another_map_or_of_tensorwise_scales_is_refused(key, value, words):
    state, _ = their_state(COINCIDE[0])
    with pytest.raises(ValueError, match=words):
        from_foreign(state_dict_of(state | {key: value}))
