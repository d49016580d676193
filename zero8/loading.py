# SPDX-License-Identifier: Apache-2.0
"""Loads a state dict into an optimizer: all of it, on all ranks that share it, or nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero8.ranks import numbers
from zero8.spec.shown import shown_keys
from zero8.state.plain import is_of_fp32

States = dict[Tensor, dict[str, Any]]


@dataclass
class _Wrapped:
    """A saved state on its way through torch's `load_state_dict`."""

    state: dict[str, Any]


def load(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    by_torch: Callable[[dict[str, Any]], None],
    adopt: Callable[[States], States],
    groups: list[Any],
) -> None:
    """Load a state dict.

    Args:
        optimizer: into which.
        state_dict: of it, or of the fp32 optimizer.
        by_torch: torch's own `load_state_dict` of the optimizer.
        adopt: returns the loaded states in the form that the optimizer keeps; called when the
            groups have been loaded.
        groups: the process groups of ranks that share its parameters.

    Raises:
        ValueError: if a state does not fit its parameter, on this or on another rank; nothing has
            been changed then.
    """

    def adopt_states(_: torch.optim.Optimizer) -> None:
        if unknown := [key for key in optimizer.state if not isinstance(key, Tensor)]:
            raise ValueError(
                f"load_state_dict: got states of {shown_keys(unknown)}, which are no parameters of "
                "its groups"
            )
        optimizer.state.update(adopt({p: saved.state for p, saved in optimizer.state.items()}))

    # torch casts every tensor to the parameter's dtype, which would destroy codes and scales; what
    # is no tensor and no container crosses it untouched, so states cross it wrapped.
    kept = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    hooks = (
        optimizer.register_load_state_dict_pre_hook(_wrap_states),
        optimizer.register_load_state_dict_post_hook(adopt_states, prepend=True),
    )
    error = None
    try:
        by_torch(state_dict)
    except Exception as raised:  # whatever it is, nothing may have been changed
        error = raised
    except BaseException:  # Ctrl-C, which the other ranks have to notice by themselves
        optimizer.__dict__.update(kept)
        raise
    finally:
        for hook in hooks:
            hook.remove()
    steps = [state.get("step", 0) for state in optimizer.state.values()] if error is None else []
    try:
        error = _error_of_ranks(error, state_dict, max(steps, default=0), groups)
    except Exception as raised:  # by a collective: other ranks are gone, say
        error = raised
    if error is not None:
        optimizer.__dict__.update(kept)
        raise error


def _wrap_states(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = state_dict["state"]
    if not isinstance(states, dict) or not all(isinstance(s, dict) for s in states.values()):
        raise ValueError("load_state_dict: got states that are no dicts, expected one of dicts")
    wrapped = {key: _Wrapped(_detached(state)) for key, state in states.items()}
    return {**state_dict, "state": wrapped}


def _detached(state: dict[str, Any]) -> dict[str, Any]:
    # An optimizer whose states are part of a graph could not be copied, and would keep the graph.
    return {
        key: value.detach() if isinstance(value, Tensor) and value.requires_grad else value
        for key, value in state.items()
    }


def _error_of_ranks(
    error: Exception | None, state_dict: dict[str, Any], step: int, groups: list[Any]
) -> Exception | None:
    """Return what the ranks of some process groups raise: their own errors, or a common one.

    Args:
        error: what the load raised here.
        state_dict: that was loaded.
        step: the largest one in the states that have been loaded.
        groups: of the ranks.
    """
    if not groups:
        return error
    # A rank that raised alone would leave the others in the collectives of the next step.
    of_fp32 = error is None and any(map(is_of_fp32, state_dict["state"].values()))
    failed, some, none, last, first = numbers.largest(
        [error is not None, of_fp32, not of_fp32, step, -step], groups
    )
    if error is None and failed:
        return ValueError(
            "load_state_dict: the states of other ranks do not fit their parameters (their errors "
            "say why); nothing has been changed on this one"
        )
    if error is None and some and none:
        return ValueError(
            "load_state_dict: got states of an fp32 optimizer on some ranks only: they have come "
            "through a state dict of another form than the checkpoint's; set state_dict_format to "
            'the checkpoint\'s, "8bit" or "fp32"'
        )
    # Ranks of one mesh hold the same parameters; of several some may train what others do not.
    if error is None and groups != [None] and last != -first:
        return ValueError(
            f"load_state_dict: got states of step {step} on this rank, of steps {-first} to {last} "
            "on all; load the same checkpoint on all ranks.  Nothing has been changed"
        )
    return error
