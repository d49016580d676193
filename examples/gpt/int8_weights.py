# SPDX-License-Identifier: Apache-2.0
"""torchao's INT8 weights, each a tensor made of two: int8 rows, and a scale for each row."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from zero8.state.extent import local


def convert(model: nn.Module) -> None:
    """Make the weights of all linear layers INT8; embeddings and biases stay as they are."""
    from torchao import quantize_
    from torchao.prototype.quantized_training import int8_weight_only_quantized_training

    quantize_(model, int8_weight_only_quantized_training())


def is_int8(tensor: Tensor) -> bool:
    """Return whether a tensor other than a DTensor wraps tensors, as torchao's weights do."""
    return is_traceable_wrapper_subclass(tensor)


def components(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that an INT8 weight is made of, by name."""
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def separated(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's state dict with each INT8 weight as the two tensors that it is made of.

    torch.distributed.checkpoint cannot save the weight itself: it asks each tensor whether its
    memory is pinned, and torchao's class does not implement that.  The two tensors are ordinary
    ones, sharded by rows as the weight is, and share its memory, so loading changes the weight.
    """
    parts: dict[str, Tensor] = {}
    for name, value in state.items():
        if not is_int8(here := local(value)):
            parts[name] = value
            continue
        for part, tensor in components(here).items():
            if isinstance(value, DTensor):
                shape = torch.Size((value.shape[0], *tensor.shape[1:]))
                layout = {"shape": shape, "stride": tensor.stride()}
                tensor = DTensor.from_local(tensor, value.device_mesh, value.placements, **layout)
            parts[f"{name}.{part}"] = tensor
    return parts
