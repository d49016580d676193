# SPDX-License-Identifier: Apache-2.0
"""The maps of the 8-bit optimizers paper: the values of codes for a tensor scaled to [-1, 1].

Each function takes that tensor, which only `quantile` looks at, and whether it has negative
elements (m) or not (v), and returns the values in ascending order, float32.
"""

import torch
from torch import Tensor

from zero8.spec.codec import CODECS


def linear(x: Tensor, signed: bool) -> Tensor:
    """Return i/127 for i from -127 to 127, which has 0 but one value less, or i/255 for v."""
    return torch.arange(-127, 128) / 127 if signed else torch.arange(256) / 255


def quantile(x: Tensor, signed: bool) -> Tensor:
    """Return the quantile map of a tensor's own elements.

        q_i = (Q(i/257) + Q((i+1)/257)) / 2,  i from 0 to 255

    Q is the quantile function of the elements, linear between them.
    """
    edges = torch.quantile(x.flatten(), torch.arange(257) / 257)
    return (edges[:-1] + edges[1:]) / 2


def dynamic(x: Tensor, signed: bool) -> Tensor:
    """Return the dynamic tree map, whose values zero8's `dynamic` has as well."""
    codec = CODECS["dynamic"]
    return (codec.of_signed if signed else codec.of_unsigned).levels


MAPS = {"linear": linear, "quantile": quantile, "dynamic": dynamic}
