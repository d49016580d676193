# SPDX-License-Identifier: Apache-2.0
"""The algorithms that there are, by the names and numbers that saved states have."""

from zero8.algorithms.adam import ADAM
from zero8.spec.algorithm import Algorithm
from zero8.spec.shown import shown

ALGORITHMS: tuple[Algorithm, ...] = (ADAM,)


def algorithm_called(name_or_number: object) -> Algorithm:
    """Return the algorithm that states call so, or raise ValueError with those there are."""
    for one in ALGORITHMS:
        if type(name_or_number) in (str, int) and name_or_number in (one.name, one.number):
            return one
    expected = ", ".join(f"{one.name!r} ({one.number})" for one in ALGORITHMS)
    raise ValueError(f"got a state of algorithm {shown(name_or_number)}, expected {expected}")
