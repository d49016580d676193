# SPDX-License-Identifier: Apache-2.0
"""Import hooks: acts on another package's module when it is imported, without importing it."""

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType


def when_imported(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call `call(module)` now if the module is loaded, or else when it is imported.

    The import raises the exceptions of `call`.
    """
    if name in sys.modules:
        call(sys.modules[name])
    else:
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder:
    """A meta path finder that finds one module by the others, and acts after its loader, once."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]):
        self.name, self.call = name, call

    def find_spec(self, name, path=None, target=None):
        """Implement the protocol of `sys.meta_path`."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader, run = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # type: ignore[method-assign]
            run(module)
            self.call(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
