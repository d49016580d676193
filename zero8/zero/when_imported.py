# SPDX-License-Identifier: Apache-2.0
"""Acts on another package's module when it is imported, without importing it."""

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType


def when_imported(name: str, call: Callable[[ModuleType], None]) -> None:
    """Call `call(module)` now if the module is loaded, or else when it is imported.

    Asking again for the same call changes nothing.  What `call` raises, the import raises.
    """
    if name in sys.modules:
        call(sys.modules[name])
    elif not any(isinstance(f, _Finder) and f.waits_for(name, call) for f in sys.meta_path):
        sys.meta_path.insert(0, _Finder(name, call))


class _Finder:
    """Finds one module as if it were not there, and has us called when it has run."""

    def __init__(self, name: str, call: Callable[[ModuleType], None]):
        self.name, self.call = name, call

    def waits_for(self, name: str, call: Callable[[ModuleType], None]) -> bool:
        """Return whether it was made for this call."""
        return (self.name, self.call) == (name, call)

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
    """Loads a module as its own loader does, which other modules may share, and then calls."""

    def __init__(self, loader, call: Callable[[ModuleType], None]):
        self.loader, self.call = loader, call

    def create_module(self, spec):
        """Leave it to the module's own loader."""
        return self.loader.create_module(spec)

    def exec_module(self, module):
        """Run the module under its own loader, then call."""
        module.__spec__.loader = module.__loader__ = self.loader
        self.loader.exec_module(module)
        self.call(module)
