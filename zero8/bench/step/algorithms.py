# SPDX-License-Identifier: Apache-2.0
"""The algorithms whose steps are timed, and the settings that all optimizers of one get."""

from typing import Any

from zero8.algorithms.adam import ADAM
from zero8.algorithms.ademamix import ADEMAMIX
from zero8.algorithms.lion import LION
from zero8.algorithms.sgd import SGD
from zero8.optimizer import OPTIMIZERS
from zero8.spec.algorithm import Algorithm, Scalars

HYPER: dict[str, dict[str, Any]] = {
    ADAM.name: {"lr": 1e-6, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01},
    LION.name: {"lr": 1e-6, "betas": (0.9, 0.99), "weight_decay": 0.01},
    SGD.name: {"lr": 1e-6, "momentum": 0.9, "weight_decay": 0.01},
    ADEMAMIX.name: {
        "lr": 1e-6,
        "betas": (0.9, 0.999, 0.9999),
        "alpha": 5.0,
        "eps": 1e-8,
        "weight_decay": 0.01,
    },
}
"""Keywords by name of the algorithm.  Every package spells these as zero8 does."""

ZERO8 = {
    optimizer.algorithm.name: optimizer
    for optimizer in OPTIMIZERS
    if not optimizer.algorithm.is_of_matrices  # its step has other costs than memory
}
"""zero8's optimizers by name of the algorithm."""


def scalars_at(algorithm: Algorithm, step: int) -> Scalars:
    """Return the scalars of step number `step` (the first is 1) with the settings of `HYPER`."""
    group = {**algorithm.options, **HYPER[algorithm.name]}
    memory = (0.0,) * len(algorithm.memory)
    for number in range(1, step + 1):
        memory = algorithm.next_memory(number, memory, group)
    return algorithm.scalars(step, memory, group, bias_correction=True)
