# SPDX-License-Identifier: Apache-2.0
"""Records which DeepSpeed engine is constructing its optimizer, and the weights that pipelines tie.

An engine does so in `_configure_optimizer`, from the config's type or from the callable given to
`deepspeed.initialize`.  An optimizer object given to `deepspeed.initialize` exists before it.
"""

import functools
from contextvars import ContextVar
from types import ModuleType

from zero8.state import tied

_engine: ContextVar[object | None] = ContextVar("engine", default=None)


def note_engines(module: ModuleType) -> None:
    """Record each engine of `deepspeed.runtime.engine` while it constructs its optimizer.

    To be called when that module is imported: the first optimizer of a process may be constructed
    by an engine, which is too late to wrap its method.

    Raises:
        AttributeError: if this DeepSpeed lacks the method; `seams.install` then reports it.
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


def note_tied_weights(pipeline_class: type) -> None:
    """Record the weights that each new `deepspeed.pipe.PipelineModule` ties across its stages.

    Args:
        pipeline_class: that class.

    Raises:
        AttributeError: if this DeepSpeed lacks its method; `seams.install` then reports it.
    """
    original, _ = pipeline_class.__init__, pipeline_class.get_tied_weights_and_groups

    @functools.wraps(original)
    def made(self, *args, **kwargs):
        original(self, *args, **kwargs)
        across = {p for p, group in self.get_tied_weights_and_groups() if group.size() > 1}
        tied.names.update((p, name) for name, p in self.named_parameters() if p in across)

    pipeline_class.__init__ = made


def constructing_engine() -> object | None:
    """Return the engine that is constructing its optimizer in this thread, or None."""
    return _engine.get()
