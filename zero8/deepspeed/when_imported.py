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
    """A meta path finder that finds one module by the others, and wraps its loader."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]):
        self.name, self.call = name, call

    def find_spec(self, name, path=None, target=None):
        """Implement the protocol of `sys.meta_path`."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.call)
        return spec


class _Loader:
    """Runs a module by its own loader, and then calls `call`."""

    def __init__(self, loader, call: Callable[[ModuleType], None]):
        self.loader, self.call = loader, call

    def create_module(self, spec):
        """Delegate to the module's own loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module):
        """Run the module under its own loader, then call."""
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.call(module)
