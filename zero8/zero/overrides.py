# SPDX-License-Identifier: Apache-2.0
"""Patches of DeepSpeed's methods; other optimizers still get DeepSpeed's own behavior."""

import functools
import inspect
from types import ModuleType

from zero8.step.interrupts import put_off
from zero8.zero import claims, swap_checkpoint, swapper
from zero8.zero.modes import unsupported_mode

SWAPPERS = {
    "PartitionedOptimizerSwapper": "PartitionedSwapper",
    "PipelinedOptimizerSwapper": "PipelinedSwapper",
}
"""Classes in deepspeed.runtime.zero.stage3, and their replacements in `zero8.zero.swapper`."""


def guard_choice(engine_class: type, optimizer_class: type) -> None:
    """Have the engine raise for modes and other optimizers that would step instead of ours."""
    original = engine_class._do_optimizer_sanity_check

    @functools.wraps(original)
    def checked(self, basic_optimizer):
        claims.check(self, basic_optimizer, optimizer_class)
        if isinstance(basic_optimizer, optimizer_class):
            if reason := unsupported_mode(self._config.zero_config):
                name = type(basic_optimizer).__name__
                raise ValueError(f"{name} does not work with {reason}")
        return original(self, basic_optimizer)

    engine_class._do_optimizer_sanity_check = checked


def explain_refusal(engine_class: type, optimizer_class: type) -> None:
    """Have the engine name the setting when it refuses our optimizer object under offload."""
    original = engine_class._configure_optimizer

    @functools.wraps(original)
    def configured(self, client_optimizer, *args, **kwargs):
        refused = self.zero_use_cpu_optimizer() and self.zero_force_ds_cpu_optimizer()
        if refused and isinstance(client_optimizer, optimizer_class):
            name = claims.in_config(type(client_optimizer).__name__)
            raise ValueError(
                "under offload DeepSpeed by default takes no optimizer object other than its own; "
                f"set {claims.SETTING} at the top level of the DeepSpeed config, or name the "
                f"optimizer there: {name} (and give Accelerate a DummyOptim)"
            )
        return original(self, client_optimizer, *args, **kwargs)

    engine_class._configure_optimizer = configured


def allow_bf16_masters(zero_class: type, optimizer_class: type) -> None:
    """Allow bf16 master weights in host memory, for which DeepSpeed requires DeepSpeedCPUAdam."""
    original = zero_class._configure_master_weights
    # The validator of bf16, whose name differs between versions; fp16's stays.
    validators = {n for n in inspect.signature(original).parameters if n.endswith("_validator")}
    names = validators - {"fp16_offload_validator"}

    @functools.wraps(original)
    def configured(self, *args, **kwargs):
        if isinstance(self.optimizer, optimizer_class):
            if kwargs.get("fp16_master_weights_and_gradients"):
                raise ValueError(
                    f"{type(self.optimizer).__name__} does not work with "
                    "fp16_master_weights_and_grads: float16 weights cannot hold its updates; leave "
                    'it out, for float32 masters, or use "bf16" with '
                    '"bf16_master_weights_and_grads"'
                )
            kwargs |= dict.fromkeys(names)
        return original(self, *args, **kwargs)

    zero_class._configure_master_weights = configured


def swap_states(stage3: ModuleType, optimizer_class: type) -> None:
    """Have ZeRO-3 use our swappers, which can carry 8-bit states."""

    def choice(theirs: type, ours: type):
        @functools.wraps(theirs, updated=())
        def make(*args, **kwargs):
            swapper_class = ours if isinstance(kwargs.get("optimizer"), optimizer_class) else theirs
            return swapper_class(*args, **kwargs)

        return make

    for name, ours in SWAPPERS.items():
        setattr(stage3, name, choice(getattr(stage3, name), getattr(swapper, ours)))


def agree_on_swapped(engine_class: type, zero3_class: type) -> None:
    """Apply `zero8.zero.swap_checkpoint` to engines that swap 8-bit states."""
    swap_checkpoint.step_together(zero3_class)
    configure, load = engine_class._configure_zero_optimizer, engine_class._load_checkpoint
    load_signature = inspect.signature(load)

    @functools.wraps(configure)
    def configured(self, optimizer):
        zero = configure(self, optimizer)
        if swap_checkpoint.is_swapping(zero):
            swap_checkpoint.prepare(zero)
        return zero

    @functools.wraps(load)
    def loaded(self, *args, **kwargs):
        if not swap_checkpoint.is_swapping(self.optimizer):
            return load(self, *args, **kwargs)
        options = load_signature.bind(self, *args, **kwargs).arguments
        moments = swap_checkpoint.check(self, options["load_dir"], options["tag"], options)
        self.optimizer.optimizer_swapper.expect_other_files()
        result = load(self, *args, **kwargs)
        swap_checkpoint.restore(self, options["load_dir"], options["tag"], moments)
        return result

    engine_class._configure_zero_optimizer = configured
    engine_class._load_checkpoint = loaded


def finish_steps(engine_class: type, optimizer_class: type) -> None:
    """Defer Python's signal handlers during the engine's step.

    A step updates groups or sub-groups in turn and counts at the end, so a checkpoint saved by a
    handler in between would hold half a step.
    """
    original = engine_class.step

    @functools.wraps(original)
    def stepped(self, *args, **kwargs):
        if not isinstance(self.basic_optimizer, optimizer_class):
            return original(self, *args, **kwargs)
        with put_off():
            return original(self, *args, **kwargs)

    engine_class.step = stepped
