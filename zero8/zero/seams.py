# SPDX-License-Identifier: Apache-2.0
"""Where zero8 fits into DeepSpeed: every seam is checked before it is used.

* `ZERO_SUPPORTED_OPTIMIZERS`: ZeRO takes optimizers by exact type.
* `DeepSpeedEngine._do_optimizer_sanity_check`: refuses, for our optimizer only, modes that bring
  an optimizer of their own.
* `ZeROOptimizer._configure_master_weights`: lifts, for our optimizer only, the demand that bf16
  master weights in host memory be stepped by DeepSpeedCPUAdam.
* `stage3.PartitionedOptimizerSwapper` and `PipelinedOptimizerSwapper`: for our optimizer only,
  swappers that can carry 8-bit states; `DeepSpeedEngine._configure_zero_optimizer` and
  `_load_checkpoint`: space for them on the disk, and a complete resume.
* `ALL_OPS`: the row of ds_report.

All of them leave every other optimizer as it was.
"""

import functools
import inspect
from importlib.metadata import version

from zero8.versions import TESTED, warn_if_untested

SWAPPERS = {
    "PartitionedOptimizerSwapper": "PartitionedSwapper",
    "PipelinedOptimizerSwapper": "PipelinedSwapper",
}
"""Names in deepspeed.runtime.zero.stage3, and in `zero8.zero.swapper` what takes their place."""


def install(optimizer_class: type) -> None:
    """Fit `optimizer_class` into the DeepSpeed that is loaded; calling it again changes nothing.

    Raises:
        RuntimeError: if this DeepSpeed lacks one of the seams.
    """
    from deepspeed.runtime import base_optimizer, engine
    from deepspeed.runtime.zero import stage3, utils

    if optimizer_class in getattr(utils, "ZERO_SUPPORTED_OPTIMIZERS", ()):
        return
    warn_if_untested("deepspeed")
    engine_class = getattr(engine, "DeepSpeedEngine", None)
    zero_class = getattr(base_optimizer, "ZeROOptimizer", None)
    _require(
        isinstance(getattr(utils, "ZERO_SUPPORTED_OPTIMIZERS", None), list),
        "the list deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS",
    )
    _require_method(engine_class, "_do_optimizer_sanity_check", {"basic_optimizer"})
    _require_method(
        zero_class,
        "_configure_master_weights",
        {"fp16_master_weights_and_gradients", "bf16_offload_validator"},
    )
    _require_swapping(engine_class, stage3)
    _guard_modes(engine_class, optimizer_class)
    _allow_bf16_masters(zero_class, optimizer_class)
    _swap_states(stage3, optimizer_class)
    _resume_swapped(engine_class)
    utils.ZERO_SUPPORTED_OPTIMIZERS.append(optimizer_class)


def add_op(all_ops) -> None:
    """Add the op to `deepspeed.ops.op_builder.all_ops`, for ds_report and ds_build."""
    from deepspeed.ops import op_builder

    from zero8.op.builder import Zero8AdamBuilder

    all_ops.ALL_OPS[Zero8AdamBuilder.NAME] = Zero8AdamBuilder()
    op_builder.Zero8AdamBuilder = Zero8AdamBuilder


def _require(found: bool, what: str) -> None:
    if not found:
        raise RuntimeError(
            f"zero8 does not fit this DeepSpeed ({version('deepspeed')}): {what} is missing or "
            "different; use one from {} to below {}".format(*TESTED["deepspeed"])
        )


def _require_method(owner: type | None, name: str, parameters: set[str]) -> None:
    method = getattr(owner, name, None)
    found = method is not None and parameters <= set(inspect.signature(method).parameters)
    _require(found, f"{getattr(owner, '__qualname__', 'the owner of')}.{name}{sorted(parameters)}")


def _guard_modes(engine_class: type, optimizer_class: type) -> None:
    original = engine_class._do_optimizer_sanity_check

    @functools.wraps(original)
    def checked(self, basic_optimizer):
        if isinstance(basic_optimizer, optimizer_class):
            refuse_unsupported_modes(self._config.zero_config)
        return original(self, basic_optimizer)

    engine_class._do_optimizer_sanity_check = checked


def refuse_unsupported_modes(zero_config) -> None:
    """Raise ValueError for ZeRO modes that cannot work with Adam8bitBlockwise, with the reason."""
    reason = None
    offload = zero_config.offload_optimizer
    if getattr(zero_config, "zenflow", None) is not None:
        reason = 'zenflow: it steps with an optimizer process of its own; remove "zenflow"'
    elif offload is not None and offload.super_offload:
        reason = (
            "offload_optimizer.super_offload: it steps with DeepSpeedCPUAdam in a process of its "
            "own and undoes steps, which 8-bit states do not allow; set it to false"
        )
    elif offload is not None and offload.ratio < 1.0:
        reason = (
            f"offload_optimizer.ratio {offload.ratio}: DeepSpeed steps the other part with "
            "another optimizer; set it to 1.0"
        )
    elif offload is not None and offload.device == "nvme" and zero_config.stage < 3:
        reason = (
            f'offload_optimizer.device "nvme" in ZeRO stage {zero_config.stage}: DeepSpeed would '
            'keep the states in memory without a word; use stage 3, or "cpu"'
        )
    elif offload is not None and offload.device == "nvme" and offload.nvme_path is None:
        reason = (
            'offload_optimizer.device "nvme" without "nvme_path": set it to a folder on the disk'
        )
    if reason:
        raise ValueError(f"Adam8bitBlockwise does not work with {reason}")


def _allow_bf16_masters(zero_class: type, optimizer_class: type) -> None:
    original = zero_class._configure_master_weights

    @functools.wraps(original)
    def configured(self, *args, **kwargs):
        if isinstance(self.optimizer, optimizer_class):
            if kwargs.get("fp16_master_weights_and_gradients"):
                raise ValueError(
                    "Adam8bitBlockwise does not work with fp16_master_weights_and_grads: float16 "
                    "weights cannot hold its updates; leave it out, for float32 masters, or use "
                    '"bf16" with "bf16_master_weights_and_grads"'
                )
            kwargs["bf16_offload_validator"] = None
        return original(self, *args, **kwargs)

    zero_class._configure_master_weights = configured


def _require_swapping(engine_class: type, stage3) -> None:
    try:
        from zero8.zero import swapper
    except ImportError as error:
        _require(False, f"what zero8.zero.swapper is made of ({error})")
    _require_method(engine_class, "_configure_zero_optimizer", {"optimizer"})
    _require_method(
        engine_class,
        "_load_checkpoint",
        {"load_dir", "tag", "load_optimizer_states", "load_module_only"},
    )
    for owner, methods in swapper.USED.items():
        for name, parameters in methods.items():
            _require_method(owner, name, parameters)
    for name in SWAPPERS:
        _require(hasattr(stage3, name), f"deepspeed.runtime.zero.stage3.{name}")


def _swap_states(stage3, optimizer_class: type) -> None:
    from zero8.zero import swapper

    def choice(theirs: type, ours: type):
        @functools.wraps(theirs, updated=())
        def make(*args, **kwargs):
            swapper_class = ours if isinstance(kwargs.get("optimizer"), optimizer_class) else theirs
            return swapper_class(*args, **kwargs)

        return make

    for name, ours in SWAPPERS.items():
        setattr(stage3, name, choice(getattr(stage3, name), getattr(swapper, ours)))


def _resume_swapped(engine_class: type) -> None:
    from zero8.zero import swap_checkpoint

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
        swap_checkpoint.check(self, options["load_dir"], options["tag"], options)
        result = load(self, *args, **kwargs)
        swap_checkpoint.restore(self, options["load_dir"], options["tag"])
        return result

    engine_class._configure_zero_optimizer = configured
    engine_class._load_checkpoint = loaded
