# SPDX-License-Identifier: Apache-2.0
"""INT8 weights: how the model gets them, which ranks can share them, and how they are saved.

They are torchao's.  Each is a tensor made of two: int8 rows, and a scale for each row.
"""

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


def check_sharding(model: nn.Module, ranks: int) -> None:
    """Check that so many ranks can share a model.

    Raises:
        ValueError: if they would cut the rows of an INT8 weight into unequal shares.
    """
    for name, param in model.named_parameters():
        if is_int8(param) and len(param) % ranks:
            raise ValueError(
                f"got {ranks} ranks for the {len(param)} rows of the INT8 weight {name}, expected "
                "a number that divides them, as torchao's weights take no padding; start as many "
                "ranks (RANKS of launch/local.sh, --nproc-per-node of torchrun)"
            )


def separated(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a model's state dict with each INT8 weight as the two tensors that it is made of.

    torch.distributed.checkpoint cannot save the weight itself: it asks each tensor whether its
    memory is pinned, and torchao's class does not implement that.  The two tensors are ordinary
    ones, sharded by rows as the weight is, so any number of ranks that divides the rows loads
    them.  They share the memory of the weight, so loading into them changes the weight.
    """
    parts: dict[str, Tensor] = {}
    for name, value in state.items():
        here = local(value)
        if is_int8(here):
            for part, tensor in components(here).items():
                parts[f"{name}.{part}"] = _sharded_as(value, tensor)
        else:
            parts[name] = value
    return parts


def is_int8(tensor: Tensor) -> bool:
    """Return whether a tensor, which is no DTensor, is made of others, as torchao's weights are."""
    return is_traceable_wrapper_subclass(tensor)


def components(tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that an INT8 weight is made of, by name."""
    names, _ = tensor.__tensor_flatten__()
    return {name: getattr(tensor, name) for name in names}


def _sharded_as(weight: Tensor, part: Tensor) -> Tensor:
    """Return a part of this rank's rows of a weight, sharded over ranks as the weight is."""
    if not isinstance(weight, DTensor):
        return part
    shape = torch.Size((weight.shape[0], *part.shape[1:]))
    return DTensor.from_local(
        part, weight.device_mesh, weight.placements, shape=shape, stride=part.stride()
    )
