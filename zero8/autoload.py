# SPDX-License-Identifier: Apache-2.0
"""Makes DeepSpeed find the optimizers by name.

`import zero8` calls `install`, and so does every `import torch` (entry point `torch.backends`).
An exception here would break `import torch` for the whole machine, so errors become warnings, and
using the optimizer then says what is wrong.  deepspeed is never imported from here, because it
imports torch.
"""

import warnings
from functools import cache
from types import ModuleType


@cache
def install() -> None:
    """Add our optimizers to `torch.optim`.

    Other optimizers only gain a clear error when given our states.
    """
    try:
        import torch

        from zero8.deepspeed.when_imported import when_imported
        from zero8.optimizer import way_back
        from zero8.optimizer.elementwise import OPTIMIZERS

        for optimizer in OPTIMIZERS:
            setattr(torch.optim, optimizer.__name__, optimizer)
        way_back.explain_refusals()
        when_imported("deepspeed.runtime.engine", _follow_engines)
    except Exception as error:
        warnings.warn(f"zero8 could not register itself: {error!r}", stacklevel=2)


def _follow_engines(_: ModuleType) -> None:
    """Patch DeepSpeed's engines, or warn: `import deepspeed` must not fail."""
    from zero8.deepspeed import seams

    try:
        seams.install_early()
    except Exception as error:
        warnings.warn(f"zero8 cannot follow DeepSpeed's engines: {error!r}", stacklevel=2)
