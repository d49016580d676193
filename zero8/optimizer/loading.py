# SPDX-License-Identifier: Apache-2.0
"""Loads a state dict into an optimizer: all of it, on all ranks that share it, or nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero8.environment import ranks
from zero8.spec.shown import shown_keys
from zero8.state.entries import FIRST_ENTRIES, is_of_fp32, param_states

States = dict[Tensor, dict[str, Any]]


@dataclass
class _Wrapped:
    """A saved state, wrapped so that torch's `load_state_dict` passes it through unchanged."""

    state: dict[str, Any]


def load(
    optimizer: torch.optim.Optimizer,
    state_dict: dict[str, Any],
    by_torch: Callable[[dict[str, Any]], None],
    adopt: Callable[[States], States],
    groups: list[Any],
) -> None:
    """Load a state dict, of the optimizer or of the fp32 one, on all ranks of `groups` or on none.

    `by_torch` is the optimizer's `load_state_dict` of torch; `adopt` returns the loaded states in
    the form that the optimizer keeps, after the groups have been loaded.

    Raises ValueError if a state does not fit its parameter, on this or on another rank; nothing has
    been changed then.
    """
    of_fp32, step = False, 0

    def adopt_states(_: torch.optim.Optimizer) -> None:
        nonlocal of_fp32, step
        wrapped = [(p, s) for p, s in optimizer.state.items() if isinstance(s, _Wrapped)]
        states = {p: saved.state for p, saved in wrapped}
        adopted = adopt(states)
        optimizer.state.update(adopted)
        of_fp32 = any(map(is_of_fp32, states.values()))
        step = max((state["step"] for state in param_states(adopted).values()), default=0)

    # torch casts every tensor to the parameter's dtype, which would destroy codes and scales.  It
    # leaves objects that are neither tensors nor containers unchanged, so states are wrapped.
    kept = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    hooks = (
        optimizer.register_load_state_dict_pre_hook(_wrap_states),
        optimizer.register_load_state_dict_post_hook(adopt_states, prepend=True),
    )
    error = None
    try:
        by_torch(state_dict)
    except Exception as raised:  # restored below, on all ranks
        error = raised
    except BaseException:  # Ctrl-C: restore here; the other ranks cannot be notified
        optimizer.__dict__.update(kept)
        raise
    finally:
        for hook in hooks:
            hook.remove()
    try:
        error = _error_of_ranks(error, of_fp32, step, groups)
    except Exception as raised:  # from a collective, for example because other ranks have died
        error = raised
    if error is not None:
        optimizer.__dict__.update(kept)
        raise error


def _wrap_states(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    states = state_dict["state"]
    if len(state_dict["param_groups"]) != len(optimizer.param_groups):
        return state_dict  # torch says so
    params = {key for group in state_dict["param_groups"] for key in group.get("params", ())}
    is_dict = isinstance(states, dict)
    if not is_dict or not all(isinstance(s, dict) for key, s in states.items() if key in params):
        raise ValueError("load_state_dict: got states that are not dicts, expected a dict of dicts")
    # Other code may keep anything there under other keys, but not what looks like lost moments.
    rest = {key: value for key, value in states.items() if key not in params}
    if unknown := [key for key, value in rest.items() if _has_moments(value)]:
        raise ValueError(
            f"load_state_dict: got states of {shown_keys(unknown)}, which are not parameters "
            "of its groups"
        )
    wrapped = {key: _Wrapped(_detached(states[key])) for key in states if key in params}
    return {**state_dict, "state": rest | wrapped}


def _has_moments(value: Any) -> bool:
    return isinstance(value, dict) and not set(FIRST_ENTRIES).isdisjoint(value)


def _detached(state: dict[str, Any]) -> dict[str, Any]:
    # States that are part of an autograd graph could not be copied, and would keep it alive.
    return {
        key: value.detach() if isinstance(value, Tensor) and value.requires_grad else value
        for key, value in state.items()
    }


def as_torch_casts(p: Tensor, key: Any, value: Any) -> Any:
    """Return an entry of other code as torch's `load_state_dict` casts those of a parameter."""
    if isinstance(value, Tensor):
        cast = torch.optim.Optimizer._process_value_according_to_param_policy
        return cast(p, value, 0, [], key)
    if isinstance(value, dict):
        return {inner: as_torch_casts(p, inner, one) for inner, one in value.items()}
    if type(value) in (list, tuple, set):  # torch's own loses strings, and named tuples
        return type(value)(as_torch_casts(p, None, one) for one in value)
    return value


def _error_of_ranks(
    error: Exception | None, of_fp32: bool, step: int, groups: list[Any]
) -> Exception | None:
    """Return the error that this rank must raise, its own or one because of others, or None.

    `of_fp32` says whether a loaded state is that of an fp32 optimizer; `step` is the largest.
    """
    if not groups:
        return error
    # A rank that raised alone would leave the others in the collectives of the next step.
    failed, some, none, last, first = ranks.largest(
        [error is not None, of_fp32, not of_fp32, step, -step], groups
    )
    if error is None and failed:
        return ValueError(
            "load_state_dict: the states of other ranks do not fit their parameters (their errors "
            "say why); nothing has been changed on this one"
        )
    if error is None and some and none:
        return ValueError(
            "load_state_dict: got states of an fp32 optimizer on some ranks only: the checkpoint "
            'was read with another state_dict_format than its own; set it to "8bit" or "fp32", as '
            "the checkpoint was saved"
        )
    # Ranks of one mesh hold the same parameters; with several meshes, some ranks may train others.
    if error is None and groups != [None] and last != -first:
        return ValueError(
            f"load_state_dict: got states of step {step} on this rank, of steps {-first} to {last} "
            "on all; load the same checkpoint on all ranks.  Nothing has been changed"
        )
    return error
