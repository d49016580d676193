# SPDX-License-Identifier: Apache-2.0
"""The keys of the entries that `zero8.state.plain` describes: which are ours, and what they say."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor

from zero8.spec.algorithm import Algorithm, MomentRule
from zero8.spec.algorithms import ALGORITHMS
from zero8.spec.codec import MomentCode
from zero8.spec.grid import UNITS
from zero8.state.header import Entries

_FIRST_MOMENTS = list(dict.fromkeys(one.moment_names[0] for one in ALGORITHMS))
CODES_ENDINGS = tuple(f"_q{bits}" for bits in UNITS)
"""Ends of the keys of codes."""
FIRST_ENTRIES = tuple(f"{name}{end}" for end in (*CODES_ENDINGS, "") for name in _FIRST_MOMENTS)
"""Keys of the codes or the values of first moments, codes first: each state has one of them."""


@cache
def first_entries(algorithm: Algorithm) -> frozenset[str]:
    """Return the keys of an algorithm's first moment, one of which each of its states has."""
    return frozenset(f"{algorithm.moment_names[0]}{end}" for end in (*CODES_ENDINGS, ""))


@cache
def _entries_of(algorithm: Algorithm) -> frozenset[str]:
    """Return the keys of all entries that states of an algorithm have in any form."""
    endings = (*CODES_ENDINGS, "_scale", "")
    moments = {f"{name}{end}" for name in algorithm.moment_names for end in endings}
    return frozenset({"step", "format", "param_correction", *algorithm.memory, *moments})


ENTRIES = frozenset[str]().union(*map(_entries_of, ALGORITHMS))
"""The keys of all entries that states of our optimizers, or of fp32 ones, have in any form."""


def is_new(state: Entries) -> bool:
    """Return whether a parameter has no state: whether all entries, if any, are other code's."""
    return ENTRIES.isdisjoint(state)


def others_in(state: Entries, algorithm: Algorithm) -> Entries:
    """Return the entries that other code keeps in the state of a parameter."""
    ours = _entries_of(algorithm)
    return {key: value for key, value in state.items() if key not in ours}


def param_states(state: Mapping[Any, Any]) -> dict[Tensor, Entries]:
    """Return the states of parameters in an `optimizer.state`, where other code may keep more."""
    return {p: s for p, s in state.items() if isinstance(p, Tensor) and not is_new(s)}


def codes_key(rule: MomentRule, code: MomentCode) -> str:
    """Return the key of the codes of a moment in the entries of a state."""
    return f"{rule.name}_q{code.bits}"


def is_of_fp32(saved: Entries) -> bool:
    """Return whether a loaded state is that of an fp32 optimizer."""
    # Loaders that merge it into a live state of ours leave our `format` beside its entries.
    has_format = "format" in saved and not isinstance(saved.get("step"), Tensor)
    return not has_format and not is_new(saved)
