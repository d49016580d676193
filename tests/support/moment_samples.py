# SPDX-License-Identifier: Apache-2.0
"""Values of moments, and moments of a partition with pieces of both kinds."""

import torch

from zero8.deepspeed.moment_tensor import MomentTensor
from zero8.spec.adam import ADAM
from zero8.spec.codec import CODECS
from zero8.state.store import MomentStore
from zero8.state.table import Piece, PieceTable

MOMENTS = ("exp_avg", "exp_avg_sq")
NUMEL = 1424
# A partition of both kinds, cut in the middle of blocks, with padding between and after.
PIECES = (
    Piece(2, 600, 150, (3, 300), 11, 256, "layers.0.weight"),
    Piece(602, 9, 0, (9,), -12, 0, "layers.0.bias"),
    Piece(620, 800, 4000, (80, 64), 2**62, 64, "embed.weight"),
)


def values_for(which, seed, numel=NUMEL):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x[torch.rand(numel, generator=generator) < 0.1] = 0.0
    return x.square() if which == "exp_avg_sq" else x


def spread_values(which, numel, seed):
    """Return values over many binades, some zero; second moments are not negative."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(numel, generator=generator)
    x *= torch.exp2(torch.randint(-20, 5, (numel,), generator=generator).float())
    x[torch.rand(numel, generator=generator) < 0.2] = 0.0
    return x.square() if which == "exp_avg_sq" else x


def moment(codec="log", which="exp_avg", seed=1, algorithm=ADAM):
    """Return a moment of the whole partition, filled."""
    rule = algorithm.moment(which)
    store = MomentStore.zeros(CODECS[codec], rule, PieceTable(PIECES, NUMEL))
    store.write(0, values_for(which, seed))
    return MomentTensor(store)


def buffers(x):
    return x.store.codes, x.store.scales, x.store.dense


def copies(x):
    return [tensor.clone() for tensor in buffers(x)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def flipped_in(data, tensor):
    """Return the bytes of a file with one bit flipped where it holds a tensor."""
    content, data = tensor.numpy().tobytes(), bytearray(data)
    assert data.count(content) == 1
    data[data.find(content) + len(content) // 2] ^= 1
    return bytes(data)


def is_plain(x):
    return type(x) is torch.Tensor
