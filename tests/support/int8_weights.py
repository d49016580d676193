# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torchao's INT8 weight, of which zero8 knows the name and the two attributes."""

import torch
from torch import Tensor, nn

from zero8.spec import int8_rows


class Int8QuantizedTrainingLinearWeight(Tensor):
    """int8 rows with one scale each; it can be made, copied and stepped, and nothing else."""

    __module__ = "torchao.stand_in"

    @staticmethod
    def __new__(cls, int_data: Tensor, scale: Tensor):
        return Tensor._make_wrapper_subclass(cls, int_data.shape, dtype=scale.dtype)

    def __init__(self, int_data: Tensor, scale: Tensor):
        self.int_data, self.scale = int_data, scale

    def __tensor_flatten__(self):
        return ["int_data", "scale"], []

    @classmethod
    def __tensor_unflatten__(cls, tensors, attributes, outer_size=None, outer_stride=None):
        return cls(tensors["int_data"], tensors["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default), func
        return cls(func(args[0].int_data), func(args[0].scale))


def int8_param(weights: Tensor, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Return a parameter of the codes nearest to float32 weights, which shows a dtype."""
    scales = int8_rows.new_scales(weights, torch.zeros(len(weights), dtype=dtype))
    codes = int8_rows.encoded(weights, scales, None)
    return nn.Parameter(Int8QuantizedTrainingLinearWeight(codes, scales))


def copy_of(p: nn.Parameter) -> nn.Parameter:
    """Return a parameter of its own with the same codes and scales."""
    return nn.Parameter(Int8QuantizedTrainingLinearWeight(p.int_data.clone(), p.scale.clone()))


def same_bits(p: nn.Parameter, other: nn.Parameter) -> bool:
    """Return whether codes and scales are the same."""
    return torch.equal(p.int_data, other.int_data) and torch.equal(p.scale, other.scale)
