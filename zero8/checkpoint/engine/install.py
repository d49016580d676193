# SPDX-License-Identifier: Apache-2.0
"""Patches DeepSpeed's engine to write and verify manifests, for our optimizers only."""

import functools
import inspect

from zero8.checkpoint.engine import load, save
from zero8.checkpoint.engine.settings import CheckpointSettings


def add_manifests(engine_class: type, optimizer_class: type) -> None:
    """Have the engine write a manifest with each checkpoint, and verify it before loading."""
    sanity_check = engine_class._do_optimizer_sanity_check

    @functools.wraps(sanity_check)
    def checked(self, basic_optimizer):
        if isinstance(basic_optimizer, optimizer_class):
            CheckpointSettings.of(self._config._param_dict)  # raises for bad settings
        return sanity_check(self, basic_optimizer)

    engine_class._do_optimizer_sanity_check = checked
    for name, ours in (("save_checkpoint", save.save), ("load_checkpoint", load.load)):
        setattr(engine_class, name, _patched(getattr(engine_class, name), ours, optimizer_class))


def _patched(original, ours, optimizer_class: type):
    signature = inspect.signature(original)

    @functools.wraps(original)
    def method(self, *args, **kwargs):
        if not isinstance(getattr(self, "basic_optimizer", None), optimizer_class):
            return original(self, *args, **kwargs)
        options = dict(signature.bind(self, *args, **kwargs).arguments)
        del options["self"]
        if not options.get("save_dir", options.get("load_dir")):
            return original(self, *args, **kwargs)  # which raises
        return ours(self, original, options)

    return method
