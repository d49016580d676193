# SPDX-License-Identifier: Apache-2.0
"""Export of 8-bit states to fp32 optimizers, and a clear error when those load ours directly."""

import functools
from typing import Any

import torch

from zero8.deepspeed.moment_tensor import HEADER, MomentTensor, is_pickled_moment, moments_in
from zero8.optimizer.blockwise import BlockwiseOptimizer
from zero8.spec.algorithms import algorithm_called
from zero8.state.header import StateHeader

REMEDY = (
    "or make float32 states first: zero8 checkpoint convert IN OUT --to fp32, --to zero for "
    "DeepSpeed's engines, or zero8.export(optimizer) in Python"
)


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of ZeRO, Accelerate and Lightning.

    Lightning's wrapper is an instance of the wrapped class, too; so this does not test the class.
    """
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def export(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return a state dict for the fp32 optimizer, with the exact decoded moments.

    For `Adam8bitBlockwise` this is torch's AdamW.  It is four times as large as `state_dict()`.
    Under FSDP2 all ranks must call it, and the tensors are DTensors.

    Args:
        optimizer: an optimizer of zero8, also in the wrappers of a trainer.

    Raises:
        ValueError: if it is another optimizer, or steps partitions of ZeRO, which only DeepSpeed's
            own checkpoints describe.
    """
    ours = innermost(optimizer)
    if not isinstance(ours, BlockwiseOptimizer):
        raise ValueError(
            f"export: got a {type(ours).__name__}, expected an optimizer of zero8, such as "
            "Adam8bitBlockwise"
        )
    if any(moments_in(state) for state in ours.states.values()):
        raise ValueError(
            "export: got an optimizer that steps partitions of ZeRO; save a checkpoint instead, "
            "and convert it: zero8 checkpoint convert DIR OUT --to zero for DeepSpeed's Adams, "
            "--to fp32 for torch's AdamW"
        )
    kept = ours.state_dict_format
    ours.state_dict_format = "fp32"
    try:
        return ours.state_dict()
    finally:
        ours.state_dict_format = kept


def explain_refusals() -> None:
    """Make other optimizers refuse to load our states.

    Otherwise they would load them, and fail at the first step because `exp_avg` is missing.
    """
    original = torch.optim.Optimizer.load_state_dict

    @functools.wraps(original)
    def load_state_dict(self: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        if not isinstance(self, BlockwiseOptimizer) and (ours := _owner_of(state_dict)):
            raise ValueError(
                f"load_state_dict: got 8-bit states of zero8's {ours}, which "
                f"{type(self).__name__} cannot read. Go on with {ours}, {REMEDY}"
            )
        original(self, state_dict)

    # For optimizers of every class, which no subclass of ours could reach.
    torch.optim.Optimizer.load_state_dict = load_state_dict  # type: ignore[method-assign]


def _owner_of(state_dict: dict[str, Any]) -> str | None:
    """Return the class of the 8-bit states in a state dict, None if there are none."""
    states = state_dict.get("state") if isinstance(state_dict, dict) else None
    for state in states.values() if isinstance(states, dict) else ():
        if isinstance(state, dict) and _is_plain(state):
            return StateHeader.of(state, "it").algorithm.class_name
        for value in state.values() if isinstance(state, dict) else ():
            if is_pickled_moment(value):
                return algorithm_called(value[HEADER]["algorithm"]).class_name
            if isinstance(value, MomentTensor):
                return algorithm_called(value.store.rule.algorithm).class_name
    return None


def _is_plain(state: dict[str, Any]) -> bool:
    return torch.is_tensor(state.get("format")) and not torch.is_tensor(state.get("step"))
