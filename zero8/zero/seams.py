# SPDX-License-Identifier: Apache-2.0
"""Where zero8 fits into DeepSpeed: every seam is checked before it is used.

* `ZERO_SUPPORTED_OPTIMIZERS`: ZeRO takes optimizers by exact type.
* `DeepSpeedEngine._do_optimizer_sanity_check`: refuses, for our optimizer only, modes that bring
  an optimizer of their own.
* `ZeROOptimizer._configure_master_weights`: lifts, for our optimizer only, the demand that bf16
  master weights in host memory be stepped by DeepSpeedCPUAdam.
* `stage3.PartitionedOptimizerSwapper` and `PipelinedOptimizerSwapper`: for our optimizer only,
  swappers that can carry 8-bit states; `DeepSpeedZeroOptimizer_Stage3.step` and `_post_step`,
  `DeepSpeedEngine._configure_zero_optimizer` and `_load_checkpoint`: errors on all ranks, space on
  the disk, and a complete resume.
* `DeepSpeedEngine._configure_optimizer`: says, when it refuses our optimizer as an object under
  offload, what to set.
* `zero8.zero.access`: views of states that are taken again, `offload_states` of ZeRO 1, 2 and 3.
* `ALL_OPS`: the row of ds_report.

All of them leave every other optimizer as it was.
"""

import functools
import inspect
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from types import ModuleType

from zero8.versions import TESTED, warn_if_untested
from zero8.zero import accelerate, access
from zero8.zero.accelerate import REMEDY
from zero8.zero.when_imported import when_imported

SWAPPERS = {
    "PartitionedOptimizerSwapper": "PartitionedSwapper",
    "PipelinedOptimizerSwapper": "PipelinedSwapper",
}
"""Names in deepspeed.runtime.zero.stage3, and in `zero8.zero.swapper` what takes their place."""


def fit_in(optimizer_class: type) -> None:
    """Fit `optimizer_class` into DeepSpeed and Accelerate, now or when they are imported.

    Raises:
        RuntimeError: as `install`, if DeepSpeed is loaded.
    """
    if "deepspeed" in sys.modules:
        install(optimizer_class)
    else:  # an engine that is given an optimizer object may be imported later
        when_imported("deepspeed.runtime.engine", _Late(optimizer_class))
    when_imported("accelerate.accelerator", accelerate.Guard(optimizer_class))


@dataclass(frozen=True)
class _Late:
    """Installs the seams when DeepSpeed has been imported."""

    optimizer_class: type

    def __call__(self, _: ModuleType) -> None:
        try:
            install(self.optimizer_class)
        except RuntimeError as error:  # `import deepspeed` must not fail; engines will say more
            warnings.warn(str(error), stacklevel=2)


def install(optimizer_class: type) -> None:
    """Fit `optimizer_class` into the DeepSpeed that is loaded; calling it again changes nothing.

    Raises:
        RuntimeError: if this DeepSpeed lacks one of the seams.
    """
    from deepspeed.runtime import base_optimizer, bf16_optimizer, engine
    from deepspeed.runtime.zero import stage3, stage_1_and_2, utils

    if optimizer_class in getattr(utils, "ZERO_SUPPORTED_OPTIMIZERS", ()):
        return
    warn_if_untested("deepspeed")
    engine_class = getattr(engine, "DeepSpeedEngine", None)
    zero_class = getattr(base_optimizer, "ZeROOptimizer", None)
    zero12_class = getattr(stage_1_and_2, "DeepSpeedZeroOptimizer", None)
    zero3_class = getattr(stage3, "DeepSpeedZeroOptimizer_Stage3", None)
    bf16_class = getattr(bf16_optimizer, "BF16_Optimizer", None)
    _require(
        isinstance(getattr(utils, "ZERO_SUPPORTED_OPTIMIZERS", None), list),
        "the list deepspeed.runtime.zero.utils.ZERO_SUPPORTED_OPTIMIZERS",
    )
    _require_method(engine_class, "_do_optimizer_sanity_check", {"basic_optimizer"})
    _require_method(engine_class, "_configure_optimizer", {"client_optimizer"})
    _require_method(
        zero_class,
        "_configure_master_weights",
        {"fp16_master_weights_and_gradients", "fp16_offload_validator"},
    )
    for views_class in (zero12_class, bf16_class):
        _require_method(views_class, "_lazy_init_hp_params_optimizer_state", set())
        _require_method(views_class, "load_state_dict", set())
    for name in access.MOVING:
        _require_method(zero12_class, name, set())
    moved = {"optimizer", "device", "pin_memory", "non_blocking"}
    _require_method(stage_1_and_2, access.OFFLOADS, moved)
    _require_method(zero3_class, "offload_states", {"include"})
    _require_method(zero3_class, "step", set())
    _require_method(zero3_class, "_post_step", set())
    _require_swapping(engine_class, stage3)
    _guard_modes(engine_class, optimizer_class)
    _explain_refusal(engine_class, optimizer_class)
    _allow_bf16_masters(zero_class, optimizer_class)
    zero12 = ("bit16_groups", "single_partition_of_fp32_groups")
    access.keep_views_fresh(zero12_class, *zero12, optimizer_class)
    bf16 = ("bf16_groups", "fp32_groups_flat_partition")
    access.keep_views_fresh(bf16_class, *bf16, optimizer_class)
    access.offload_codes(stage_1_and_2, optimizer_class)
    access.refuse_to_move_states(zero3_class, optimizer_class)
    _swap_states(stage3, optimizer_class)
    _agree_on_swapped(engine_class, zero3_class)
    utils.ZERO_SUPPORTED_OPTIMIZERS.append(optimizer_class)


def add_op(all_ops) -> None:
    """Add the op to `deepspeed.ops.op_builder.all_ops`, for ds_report and ds_build."""
    from deepspeed.ops import op_builder

    from zero8.zero.op_builder import Zero8AdamBuilder

    all_ops.ALL_OPS[Zero8AdamBuilder.NAME] = Zero8AdamBuilder()
    op_builder.Zero8AdamBuilder = Zero8AdamBuilder


def _require(found: bool, what: str) -> None:
    if not found:
        raise RuntimeError(
            f"zero8 does not fit this DeepSpeed ({version('deepspeed')}): {what} is missing or "
            "different; use one from {} to below {}".format(*TESTED["deepspeed"])
        )


def _require_method(owner: type | ModuleType | None, name: str, parameters: set[str]) -> None:
    method = getattr(owner, name, None)
    found = method is not None and parameters <= set(inspect.signature(method).parameters)
    _require(found, f"{getattr(owner, '__name__', 'the owner of')}.{name}{sorted(parameters)}")


def _guard_modes(engine_class: type, optimizer_class: type) -> None:
    original = engine_class._do_optimizer_sanity_check

    @functools.wraps(original)
    def checked(self, basic_optimizer):
        if isinstance(basic_optimizer, optimizer_class):
            if reason := unsupported_mode(self._config.zero_config):
                raise ValueError(f"Adam8bitBlockwise does not work with {reason}")
        return original(self, basic_optimizer)

    engine_class._do_optimizer_sanity_check = checked


def _explain_refusal(engine_class: type, optimizer_class: type) -> None:
    original = engine_class._configure_optimizer

    @functools.wraps(original)
    def configured(self, client_optimizer, *args, **kwargs):
        refused = self.zero_use_cpu_optimizer() and self.zero_force_ds_cpu_optimizer()
        if refused and isinstance(client_optimizer, optimizer_class):
            raise ValueError(
                "DeepSpeed takes no optimizer object other than its own under offload unless it is "
                f"told to; {REMEDY}"
            )
        return original(self, client_optimizer, *args, **kwargs)

    engine_class._configure_optimizer = configured


def unsupported_mode(zero_config) -> str | None:
    """Return why a ZeRO mode cannot work with Adam8bitBlockwise and what to do, None if it can."""
    reason = None
    offload = zero_config.offload_optimizer
    if getattr(zero_config, "zenflow", None) is not None:
        reason = 'zenflow: it steps with an optimizer process of its own; remove "zenflow"'
    elif offload is not None and offload.super_offload:
        reason = (
            "offload_optimizer.super_offload: it steps with DeepSpeedCPUAdam in a process of its "
            "own and undoes steps, which 8-bit states do not allow; set it to false"
        )
    elif offload is not None and offload.ratio < 1.0 and offload.device != "none":
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
    return reason


def _allow_bf16_masters(zero_class: type, optimizer_class: type) -> None:
    original = zero_class._configure_master_weights
    # The validator of bf16, which has had two names; fp16's stays.
    validators = {n for n in inspect.signature(original).parameters if n.endswith("_validator")}
    names = validators - {"fp16_offload_validator"}

    @functools.wraps(original)
    def configured(self, *args, **kwargs):
        if isinstance(self.optimizer, optimizer_class):
            if kwargs.get("fp16_master_weights_and_gradients"):
                raise ValueError(
                    "Adam8bitBlockwise does not work with fp16_master_weights_and_grads: float16 "
                    "weights cannot hold its updates; leave it out, for float32 masters, or use "
                    '"bf16" with "bf16_master_weights_and_grads"'
                )
            kwargs |= dict.fromkeys(names)
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


def _agree_on_swapped(engine_class: type, zero3_class: type) -> None:
    from zero8.zero import swap_checkpoint

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
        swap_checkpoint.check(self, options["load_dir"], options["tag"], options)
        result = load(self, *args, **kwargs)
        swap_checkpoint.restore(self, options["load_dir"], options["tag"])
        return result

    engine_class._configure_zero_optimizer = configured
    engine_class._load_checkpoint = loaded
