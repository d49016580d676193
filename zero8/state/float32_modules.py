# SPDX-License-Identifier: Apache-2.0
"""The modules whose parameters keep float32 moments, whatever an optimizer's settings are.

The module is noted, not its parameters: `fully_shard`, `to_empty`, deep copies and loading with
`assign=True` put other objects in their places.
"""

from weakref import WeakSet

from torch import Tensor, nn

REASON = "in a StableEmbedding"

_modules: WeakSet[nn.Module] = WeakSet()


def add(module: nn.Module) -> None:
    """Keep float32 moments of a module's parameters, in optimizers that are made from now on."""
    _modules.add(module)


def params() -> set[Tensor]:
    """Return the parameters that these modules have now, also those of their children."""
    return {p for module in tuple(_modules) for p in module.parameters()}
