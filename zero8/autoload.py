# SPDX-License-Identifier: Apache-2.0
"""Makes DeepSpeed find the optimizer and the op by name.

`import zero8` calls `install`, and so does every `import torch` (entry point `torch.backends`).
An exception here would break `import torch` for the whole machine, so errors become warnings, and
using the optimizer then says what is wrong.  deepspeed is never imported from here, because it
imports torch.
"""

import warnings


def install() -> None:
    """Add our optimizers to `torch.optim`, our op to DeepSpeed's.

    Other optimizers only gain a clear error when given our states.
    """
    try:
        import torch

        from zero8 import known_frameworks, way_back
        from zero8.optimizer import OPTIMIZERS
        from zero8.zero.when_imported import when_imported

        known_frameworks.register()
        for optimizer in OPTIMIZERS:
            setattr(torch.optim, optimizer.__name__, optimizer)
        way_back.explain_refusals()
        when_imported("deepspeed.runtime.engine", _note_engines)
        when_imported("deepspeed.ops.op_builder.all_ops", _add_op)
    except Exception as error:
        warnings.warn(f"zero8 could not register itself: {error!r}", stacklevel=2)


def _note_engines(engine) -> None:
    try:
        from zero8.zero import constructing

        constructing.note_engines(engine)
        constructing.note_tied_weights(engine.PipelineModule)
    except Exception as error:
        warnings.warn(f"zero8 cannot follow DeepSpeed's engines: {error!r}", stacklevel=2)


def _add_op(all_ops) -> None:
    try:
        from zero8.zero import seams

        seams.add_op(all_ops)
    except Exception as error:
        warnings.warn(f"zero8 could not add its op to ds_report: {error!r}", stacklevel=2)
