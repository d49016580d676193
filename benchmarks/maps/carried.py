# SPDX-License-Identifier: Apache-2.0
"""States kept in 8 bits for a whole run: what errors of single steps add up to."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.fidelity.pool import Job
from benchmarks.fidelity.replay import replay
from benchmarks.fidelity.schemes import Scheme, reimplemented, zero8_scheme
from benchmarks.fidelity.training import Recipe
from benchmarks.maps.codes import GRAINS, LOG, code_of
from benchmarks.maps.levels import MAPS

ZERO8_DYNAMIC = "dynamic of zero8"
_NEAREST = "nearest value, v may round to 0, |u| is not clipped"
_TENSOR_LOG = "as in a step of zero8, but |u| is not clipped"


def schemes() -> list[Scheme]:
    """Return the maps with both grains, and zero8's own optimizer."""
    maps = [
        reimplemented(name, code_of(name, grain), _NEAREST) for grain in GRAINS for name in MAPS
    ]
    tensor_log = reimplemented(LOG, code_of(LOG, "tensor"), _TENSOR_LOG)
    return [
        *maps,
        zero8_scheme(LOG),
        tensor_log,
        replace(zero8_scheme("dynamic"), name=ZERO8_DYNAMIC),
    ]


def carried(recipe: Recipe, on_step: Callable[[], None]) -> list[dict]:
    """Run the replay with all schemes."""
    rows, skipped = replay(recipe, schemes(), on_step)
    assert not skipped, skipped  # none of them is a package that may be missing
    return rows


@dataclass(frozen=True)
class Carried:
    """The measurement: one replay."""

    recipe: Recipe

    def jobs(self) -> list[Job]:
        """Return the replay."""
        return [Job(carried, (self.recipe,), self.recipe.steps)]

    def result(self, results: dict[Job, Any]) -> dict:
        """Return a row per scheme, the grain being "tensor" where there are no blocks."""
        rows = results[self.jobs()[0]]
        return {
            "carried": [
                {"map": row["scheme"], "grain": "block" if row["block_size"] else "tensor", **row}
                for row in rows
            ]
        }
