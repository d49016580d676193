# SPDX-License-Identifier: Apache-2.0
"""The parameters by the algorithm that steps them, as `zero8.muon` splits them."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from zero8.algorithms.adam import ADAM
from zero8.algorithms.muon import MUON
from zero8.muon import is_for_muon, largest_first
from zero8.plan.model import Model, Param
from zero8.plan.setup import Setup
from zero8.spec.algorithm import Algorithm


def groups_of(model: Model, setup: Setup) -> list[tuple[Algorithm, Sequence[Param]]]:
    """Return each algorithm with its parameters; engines cut each of these groups by itself."""
    if not setup.algorithm.is_of_matrices:
        return [(setup.algorithm, model.params)]
    groups: dict[Algorithm, list[Param]] = defaultdict(list)
    for name, shape in model.params:
        is_muons = is_for_muon(name, shape, setup.adam_params)
        groups[MUON if is_muons else ADAM].append((name, shape))
    if setup.engine == "deepspeed":
        groups[MUON] = largest_first(groups[MUON], lambda param: param[1])
    return list(groups.items())


def muons_params(model: Model, setup: Setup) -> Sequence[Param]:
    """Return the parameters that Muon steps."""
    return dict(groups_of(model, setup)).get(MUON, ())


def matrices_in(model: Model, setup: Setup) -> Iterator[tuple[int, ...]]:
    """Return an iterator of the shapes of `muons_params`."""
    return (shape for _, shape in muons_params(model, setup))
