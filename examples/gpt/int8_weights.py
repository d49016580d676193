# SPDX-License-Identifier: Apache-2.0
"""INT8 weights of the model: torchao's tensors, their limits under FSDP2, and their checkpoints.

torchao's weight is a tensor made of two: rows of int8, and a scale for each row.
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
    """Return the weights of a state dict with each INT8 weight as the two tensors it is made of.

    torch.distributed.checkpoint cannot write torchao's class (it asks each tensor whether its
    memory is pinned, which the class does not answer), and would reshard it as one tensor.  The
    two are ordinary tensors, sharded by rows like the weight, and share its memory: what is loaded
    into them is in the weight.
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
    """Return a part as what it is of the weight: a plain tensor, or this rank's rows."""
    if not isinstance(weight, DTensor):
        return part
    shape = torch.Size((weight.shape[0], *part.shape[1:]))
    return DTensor.from_local(
        part, weight.device_mesh, weight.placements, shape=shape, stride=part.stride()
    )
