# SPDX-License-Identifier: Apache-2.0
"""Makes DeepSpeed find the optimizer and the op by name.

`import zero8` calls `install`, and so does every `import torch` (entry point `torch.backends`).
An exception here would break `import torch` for the whole machine, so nothing is let out: a
failure becomes a warning, and using the optimizer then says what is wrong.  deepspeed is never
imported from here: it imports torch.
"""

import importlib.util
import sys
import warnings

_OPS_MODULE = "deepspeed.ops.op_builder.all_ops"


def install() -> None:
    """Set `torch.optim.Adam8bitBlockwise`, allow our pickles, and list the op in ds_report."""
    try:
        import torch

        from zero8.zero.moment_tensor import rebuild_moment
        from zero8.zero.optimizer import Adam8bitBlockwise

        torch.optim.Adam8bitBlockwise = Adam8bitBlockwise
        torch.serialization.add_safe_globals([rebuild_moment])
        if _OPS_MODULE in sys.modules:
            _add_op(sys.modules[_OPS_MODULE])
        elif not any(isinstance(finder, _OpsFinder) for finder in sys.meta_path):
            sys.meta_path.insert(0, _OpsFinder())
    except Exception as error:
        warnings.warn(f"zero8 could not register itself: {error!r}", stacklevel=2)


def _add_op(all_ops) -> None:
    try:
        from zero8.zero import seams

        seams.add_op(all_ops)
    except Exception as error:
        warnings.warn(f"zero8 could not add its op to ds_report: {error!r}", stacklevel=2)


class _OpsFinder:
    """Adds our row when DeepSpeed's table of ops is imported, and only then."""

    def find_spec(self, name, path=None, target=None):
        """Find the module as if we were not there, and have its loader call us afterwards."""
        if name != _OPS_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                _add_op(module)

            spec.loader.exec_module = exec_module
        return spec
