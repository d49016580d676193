# SPDX-License-Identifier: Apache-2.0
"""The table of algorithms, with lookups by their names and numbers in saved states."""

from collections.abc import Iterable

from zero8.spec.adam import ADAM
from zero8.spec.ademamix import ADEMAMIX
from zero8.spec.algorithm import Algorithm
from zero8.spec.lion import LION
from zero8.spec.muon import MUON
from zero8.spec.sgd import SGD
from zero8.spec.shown import shown, shown_keys

ALGORITHMS: tuple[Algorithm, ...] = (ADAM, LION, SGD, ADEMAMIX, MUON)


def algorithm_of_fp32(entries: Iterable[object]) -> Algorithm:
    """Return the algorithm whose moments an fp32 optimizer's state has, or raise ValueError."""
    found = set(entries)
    fitting = [one for one in ALGORITHMS if found.issuperset(one.moment_names)]
    if not fitting:
        raise ValueError(f"got entries {shown_keys(dict.fromkeys(found))}, without moments")
    return max(fitting, key=lambda one: len(one.moments))


def algorithm_called(name_or_number: object) -> Algorithm:
    """Return the algorithm with this name or number in states; raise ValueError if unknown."""
    for one in ALGORITHMS:
        if type(name_or_number) in (str, int) and name_or_number in (one.name, one.number):
            return one
    expected = ", ".join(f"{one.name!r} ({one.number})" for one in ALGORITHMS)
    raise ValueError(f"got a state of algorithm {shown(name_or_number)}, expected {expected}")
