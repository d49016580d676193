# SPDX-License-Identifier: Apache-2.0
"""The numbers that states keep beside their moments, as `Algorithm.memory` lists them."""

from collections.abc import Callable
from functools import cache
from operator import itemgetter

from zero8.spec.algorithm import UNKNOWN, Algorithm
from zero8.spec.shown import shown
from zero8.state.header import Entries


def unknown_memory(algorithm: Algorithm) -> Entries:
    """Return the entries for moments of unknown origin."""
    return dict.fromkeys(algorithm.memory, UNKNOWN)


def new_memory(algorithm: Algorithm) -> Entries:
    """Return the entries before the first step."""
    return dict.fromkeys(algorithm.memory, 0.0)


@cache
def counters(algorithm: Algorithm) -> dict[str, Callable[[Entries], float]]:
    """Return fast readers of the step and the remembered numbers of a state, by their names."""
    return {name: itemgetter(name) for name in ("step", *algorithm.memory)}


def checked_memory(algorithm: Algorithm, saved: Entries) -> Entries:
    """Return the entries of a saved state; raise ValueError if one is not a float in its range."""
    for name in algorithm.memory:
        value = saved[name]
        if type(value) is not float or not 0.0 <= value <= UNKNOWN:
            raise ValueError(
                f"state entry {name}: got {shown(value)}, expected a float from 0 to {UNKNOWN}"
            )
    return {name: saved[name] for name in algorithm.memory}
