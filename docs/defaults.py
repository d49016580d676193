# SPDX-License-Identifier: Apache-2.0
"""An extension of mkdocstrings: the optimizers' signatures show the values of their defaults.

The sources have expressions there, such as `ADAM.options["lr"]`.
"""

import inspect
from importlib import import_module
from typing import Any

import griffe


class Defaults(griffe.Extension):
    """Puts values in place of expressions."""

    def on_function(self, *, func: griffe.Function, **others: Any) -> None:
        """Replace the defaults of a constructor in zero8.optimizer."""
        module, _, owner = func.parent.path.rpartition(".")
        if func.name != "__init__" or not module.startswith("zero8.optimizer."):
            return
        real = inspect.signature(getattr(import_module(module), owner).__init__).parameters
        for parameter in func.parameters:
            if "[" in str(parameter.default):
                parameter.default = repr(real[parameter.name].default)
