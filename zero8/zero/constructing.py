# SPDX-License-Identifier: Apache-2.0
"""Knows which of DeepSpeed's engines is making its optimizer.

An engine makes it in `_configure_optimizer`: of the type that the config names, or by the function
that `deepspeed.initialize` was given.  An optimizer object that it was given was made before.
"""

import functools
from contextvars import ContextVar
from types import ModuleType

_engine: ContextVar[object | None] = ContextVar("engine", default=None)


def note_engines(module: ModuleType) -> None:
    """Have the engines of `deepspeed.runtime.engine` be known while they make their optimizers.

    When that is imported: the first optimizer of a process is made within an engine, too late.

    Raises:
        AttributeError: if this DeepSpeed lacks the seam; making an optimizer then says so.
    """
    engine_class = module.DeepSpeedEngine
    original = engine_class._configure_optimizer

    @functools.wraps(original)
    def configured(self, *args, **kwargs):
        token = _engine.set(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            _engine.reset(token)

    engine_class._configure_optimizer = configured


def constructing_engine() -> object | None:
    """Return the engine that is making its optimizer in this thread, None if none is."""
    return _engine.get()
