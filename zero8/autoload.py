# SPDX-License-Identifier: Apache-2.0
"""Makes DeepSpeed find the optimizer and the op by name.

`import zero8` calls `install`, and so does every `import torch` (entry point `torch.backends`).
An exception here would break `import torch` for the whole machine, so errors become warnings, and
using the optimizer then says what is wrong.  deepspeed is never imported from here, because it
imports torch.
"""

import warnings
from collections.abc import Callable
from functools import cache
from types import ModuleType


@cache
def install() -> None:
    """Add our optimizers to `torch.optim`, our op to DeepSpeed's.

    Other optimizers only gain a clear error when given our states.
    """
    try:
        import torch
        from wrapt import register_post_import_hook

        from zero8.deepspeed import seams
        from zero8.optimizer import way_back
        from zero8.optimizer.elementwise import OPTIMIZERS

        for optimizer in OPTIMIZERS:
            setattr(torch.optim, optimizer.__name__, optimizer)
        way_back.explain_refusals()
        for module, act, failure in (
            ("runtime.engine", seams.install_early, "cannot follow DeepSpeed's engines"),
            ("ops.op_builder.all_ops", seams.add_op, "could not add its op to ds_report"),
        ):
            register_post_import_hook(_warned(act, failure), f"deepspeed.{module}")
    except Exception as error:
        warnings.warn(f"zero8 could not register itself: {error!r}", stacklevel=2)


def _warned(act: Callable[[ModuleType], None], failure: str) -> Callable[[ModuleType], None]:
    """Return a function that warns where `act` raises: `import deepspeed` must not fail."""

    def call(module: ModuleType) -> None:
        try:
            act(module)
        except Exception as error:
            warnings.warn(f"zero8 {failure}: {error!r}", stacklevel=2)

    return call
