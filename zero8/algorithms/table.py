# SPDX-License-Identifier: Apache-2.0
"""The algorithms that there are, by the names and numbers that saved states have."""

from collections.abc import Iterable

from zero8.algorithms.adam import ADAM
from zero8.algorithms.lion import LION
from zero8.spec.algorithm import Algorithm
from zero8.spec.shown import shown, shown_keys

ALGORITHMS: tuple[Algorithm, ...] = (ADAM, LION)


def algorithm_of_fp32(entries: Iterable[object]) -> Algorithm:
    """Return the algorithm whose moments the entries of an fp32 optimizer's state are.

    Raises:
        ValueError: if there is none.
    """
    found = set(entries)
    fitting = [one for one in ALGORITHMS if found.issuperset(one.moment_names)]
    if not fitting:
        raise ValueError(f"got entries {shown_keys(dict.fromkeys(found))}, without moments")
    return max(fitting, key=lambda one: len(one.moments))


def algorithm_called(name_or_number: object) -> Algorithm:
    """Return the algorithm that states call so, or raise ValueError with those there are."""
    for one in ALGORITHMS:
        if type(name_or_number) in (str, int) and name_or_number in (one.name, one.number):
            return one
    expected = ", ".join(f"{one.name!r} ({one.number})" for one in ALGORITHMS)
    raise ValueError(f"got a state of algorithm {shown(name_or_number)}, expected {expected}")
