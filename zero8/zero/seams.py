# SPDX-License-Identifier: Apache-2.0
"""The places ("seams") where zero8 patches DeepSpeed; all are checked before any is patched.

Patches act on our optimizers only.
"""

import importlib
import inspect
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from operator import attrgetter

from zero8.checkpoint.engine.install import add_manifests
from zero8.versions import TESTED, warn_if_untested
from zero8.zero import (
    access,
    narrow_grads,
    sharing,
    universal_load,
    unscaling,
    weight_copies,
)
from zero8.zero.when_imported import when_imported


@dataclass(frozen=True)
class Seam:
    """A member of DeepSpeed that zero8 patches or relies on.

    Attributes:
        module: its module.
        name: its name there, such as `Class.method`.
        parameters: the parameters that zero8 relies on.
        change: the effect of zero8's patch; empty if zero8 only calls or overrides the member.
    """

    module: str
    name: str
    parameters: tuple[str, ...] = ()
    change: str = ""

    def found(self) -> object | None:
        """Return the member, None if it is missing."""
        try:
            return attrgetter(self.name)(importlib.import_module(self.module))
        except (ImportError, AttributeError):
            return None

    def check(self) -> None:
        """Raise RuntimeError unless it exists and takes the parameters."""
        there = self.found()
        if self.name == SUPPORTED:
            fits = isinstance(there, list)
        else:
            fits = there is not None and self._takes_parameters(there)
        if not fits:
            what = f"{self.module}.{self.name}({', '.join(self.parameters)})"
            raise RuntimeError(
                f"zero8 does not fit this DeepSpeed ({version('deepspeed')}): {what} is missing or "
                "different; use one from {} to below {}".format(*TESTED["deepspeed"])
            )

    def _takes_parameters(self, there: object) -> bool:
        return not self.parameters or set(self.parameters) <= set(
            inspect.signature(there).parameters
        )

    @property
    def state(self) -> str:
        """Return "missing", "present", or "installed" if zero8 has patched it."""
        return state_of(self.found())


SUPPORTED = "ZERO_SUPPORTED_OPTIMIZERS"
_ENGINE = "deepspeed.runtime.engine"
_ZERO = "deepspeed.runtime.zero"
_STAGE12 = f"{_ZERO}.stage_1_and_2"
_STAGE3 = f"{_ZERO}.stage3"
_BF16 = "deepspeed.runtime.bf16_optimizer"
_SWAP = "deepspeed.runtime.swap_tensor"
_PARTITIONED = f"{_SWAP}.partitioned_optimizer_swapper"
_PIPELINED = f"{_SWAP}.pipelined_optimizer_swapper"
_PIPE = "deepspeed.runtime.pipe"
_CHECKPOINT = "deepspeed.runtime.checkpoint_engine"
_PADDING = "loads universal checkpoints on ranks that hold only padding, too"
_VIEWS = "refreshes views of states that have changed"

SEAMS = (
    Seam(f"{_ZERO}.utils", SUPPORTED, change="lists the classes of our optimizers"),
    Seam(
        _ENGINE,
        "DeepSpeedEngine._do_optimizer_sanity_check",
        ("basic_optimizer",),
        "refuses modes and other optimizers that would step instead of ours",
    ),
    Seam(
        _ENGINE,
        "DeepSpeedEngine._configure_optimizer",
        ("client_optimizer",),
        "records the engine, and names the setting that allows our optimizer as an object",
    ),
    Seam(
        f"{_PIPE}.module",
        "PipelineModule.__init__",
        change="records the weights that are tied across stages",
    ),
    Seam(f"{_PIPE}.module", "PipelineModule.get_tied_weights_and_groups"),
    Seam(
        "deepspeed.runtime.base_optimizer",
        "ZeROOptimizer._configure_master_weights",
        ("fp16_master_weights_and_gradients", "fp16_offload_validator"),
        "does not require DeepSpeedCPUAdam for bf16 master weights in host memory",
    ),
    Seam(_STAGE3, "PartitionedOptimizerSwapper", change="carries 8-bit states"),
    Seam(_STAGE3, "PipelinedOptimizerSwapper", change="carries 8-bit states"),
    Seam(
        _ENGINE,
        "DeepSpeedEngine._configure_zero_optimizer",
        ("optimizer",),
        "reserves disk space for swapped states, on all ranks or on none",
    ),
    Seam(
        _ENGINE,
        "DeepSpeedEngine._load_checkpoint",
        ("load_dir", "tag", "load_optimizer_states", "load_module_only"),
        "checks swap files before it loads them, and restores groups and small sub-groups, too",
    ),
    Seam(
        _ENGINE,
        "DeepSpeedEngine.save_checkpoint",
        ("save_dir", "tag", "save_latest"),
        "writes a manifest last, on all ranks or on none",
    ),
    Seam(
        _ENGINE,
        "DeepSpeedEngine.load_checkpoint",
        ("load_dir", "tag", "load_optimizer_states", "load_module_only"),
        "verifies the files and compares the parameters first, on all ranks or on none",
    ),
    Seam(
        _ENGINE,
        "DeepSpeedEngine.step",
        change="defers signal handlers until the step is done and counted",
    ),
    Seam(_ENGINE, "DeepSpeedEngine._optimizer_has_ckpt_event_epilogue"),
    Seam(_ENGINE, "DeepSpeedEngine._get_zero_param_shapes"),
    Seam(_ENGINE, "DeepSpeedEngine._get_ckpt_name", ("checkpoints_path", "tag")),
    Seam(_ENGINE, "DeepSpeedEngine._get_zero_ckpt_name", ("checkpoints_path", "tag")),
    Seam(_ENGINE, "get_fp32_state_dict_from_zero_checkpoint", ("tag",)),
    Seam(f"{_CHECKPOINT}.torch_checkpoint_engine", "TorchCheckpointEngine.save", ("path",)),
    Seam(f"{_CHECKPOINT}.torch_checkpoint_engine", "TorchCheckpointEngine.load", ("path",)),
    *(
        Seam(module, f"{name}.{method}", parameters, change)
        for module, name in ((_STAGE12, "DeepSpeedZeroOptimizer"), (_BF16, "BF16_Optimizer"))
        for method, parameters, change in (
            ("_lazy_init_hp_params_optimizer_state", (), _VIEWS),
            ("load_state_dict", ("state_dict_list",), _VIEWS),
        )
    ),
    Seam(_STAGE12, "DeepSpeedZeroOptimizer.offload_states", change=_VIEWS),
    Seam(_STAGE12, "DeepSpeedZeroOptimizer.reload_states", change=_VIEWS),
    Seam(
        _STAGE12,
        access.OFFLOADS,
        ("optimizer", "device", "pin_memory", "non_blocking"),
        "keeps moments in 8 bits",
    ),
    Seam(
        _STAGE3,
        "DeepSpeedZeroOptimizer_Stage3.offload_states",
        ("include",),
        "says what it cannot move",
    ),
    *(
        Seam(
            module, f"{name}.{universal_load.LOADS}", ("lp_groups_name", "checkpoint_dir"), _PADDING
        )
        for module, name in ((_STAGE12, "DeepSpeedZeroOptimizer"), (_BF16, "BF16_Optimizer"))
    ),
    Seam(
        _STAGE3,
        f"DeepSpeedZeroOptimizer_Stage3.{universal_load.LOADS_STAGE3}",
        ("checkpoint_dir",),
        "loads the options of every parameter group from universal checkpoints",
    ),
    Seam(
        _STAGE12,
        f"DeepSpeedZeroOptimizer.{universal_load.LINKS}",
        change="finds parameters correctly under round_robin_gradients",
    ),
    *(
        Seam(
            module,
            f"{name}.{method}",
            change=change,
        )
        for change, methods12, methods3 in (
            (
                "leaves the factor of the gradients to our step, on the CPU",
                (unscaling.UNSCALES, unscaling.RESETS, unscaling.ACCUMULATES),
                (unscaling.UNSCALES, unscaling.RESETS),
            ),
            (
                "takes 16-bit weights in host memory from our step, which has written them",
                (weight_copies.STEPS,),
                (weight_copies.STEPS, weight_copies.REASSIGNS),
            ),
            (
                "keeps weights and gradients of one dtype in host memory once",
                (),
                (sharing.CREATES, sharing.SETS_UP, sharing.PARTITIONS, *sharing.TOUCHES),
            ),
            (
                "keeps gradients in host memory in the dtype that they were reduced in",
                (narrow_grads.STATES,),
                (narrow_grads.SAVES,),
            ),
        )
        for module, name, methods in (
            (_STAGE12, "DeepSpeedZeroOptimizer", methods12),
            (_STAGE3, "DeepSpeedZeroOptimizer_Stage3", methods3),
        )
        for method in methods
    ),
    Seam(_STAGE3, "DeepSpeedZeroOptimizer_Stage3.step", change="raises on all ranks or on none"),
    Seam(_STAGE3, "DeepSpeedZeroOptimizer_Stage3._post_step", change="has the ranks agree first"),
    Seam("deepspeed.ops.op_builder.all_ops", "ALL_OPS", change="lists our op, for ds_report"),
    *(
        Seam(module, f"{name}.{method}", parameters)
        for module, name, methods in (
            (
                _PARTITIONED,
                "PartitionedOptimizerSwapper",
                {
                    "swap_in_optimizer_state": ("parameter", "async_parameter"),
                    "_swap_in_parameter": ("aio_handle", "parameter", "dest_buffers"),
                    "_swap_out_optimizer_state": ("swap_info",),
                    "release_swap_buffers": ("parameter",),
                },
            ),
            (
                _PIPELINED,
                "PipelinedOptimizerSwapper",
                {
                    "swap_in_optimizer_state": ("parameter", "async_parameter"),
                    "swap_out_optimizer_state": ("parameter", "async_swap"),
                    "release_swap_buffers": ("parameter",),
                    "writeback_optimizer_state_and_gradients": (
                        "parameter",
                        "write_opt_state",
                        "write_gradients",
                    ),
                    "_swap_in_optimizer_state": ("aio_handle", "parameter"),
                    "_swap_out_optimizer_state": ("aio_handle", "parameter", "swap_in_op"),
                    "_complete_swap_out": ("swap_out_type",),
                },
            ),
            (
                f"{_SWAP}.optimizer_utils",
                "OptimizerSwapper",
                {
                    "_create_param_swap_info": ("parameter", "numel"),
                    "_get_state_tensors": ("parameter",),
                    "_adjust_for_misaligned_lengths": ("tensors", "offsets"),
                },
            ),
        )
        for method, parameters in methods.items()
    ),
)
"""All of DeepSpeed that zero8 depends on."""


def fit_in(base_class: type, optimizer_class: type) -> None:
    """Patch DeepSpeed, now or when it is imported.

    Args:
        base_class: of the optimizers to patch it for.
        optimizer_class: the one that DeepSpeed is to take.

    Raises:
        RuntimeError: as `install`, if DeepSpeed is loaded.
    """
    if sys.modules.get("deepspeed"):
        install(base_class, optimizer_class)
    else:  # a script may make its optimizer first
        when_imported("deepspeed.runtime.engine", _Install(base_class, optimizer_class))


@dataclass(frozen=True)
class _Install:
    """Calls `install` once DeepSpeed has been imported."""

    base_class: type
    optimizer_class: type

    def __call__(self, _) -> None:
        try:
            install(self.base_class, self.optimizer_class)
        except RuntimeError as error:  # `import deepspeed` must not fail
            warnings.warn(str(error), stacklevel=2)


def install(base_class: type, optimizer_class: type) -> None:
    """Patch the loaded DeepSpeed once for `base_class`, and have it take `optimizer_class`.

    Raises:
        RuntimeError: if this DeepSpeed lacks one of the seams; nothing is patched then.
    """
    from deepspeed.runtime.zero import utils

    known = getattr(utils, SUPPORTED, ())
    if optimizer_class in known:
        return
    if not any(issubclass(one, base_class) for one in known):
        warn_if_untested("deepspeed")
        for seam in SEAMS:
            seam.check()
        _patch(base_class)
    utils.ZERO_SUPPORTED_OPTIMIZERS.append(optimizer_class)


def _patch(optimizer_class: type) -> None:
    from deepspeed.runtime import base_optimizer, bf16_optimizer, engine
    from deepspeed.runtime.zero import stage3, stage_1_and_2

    from zero8.zero import overrides  # imports DeepSpeed's swappers

    engine_class, zero3_class = engine.DeepSpeedEngine, stage3.DeepSpeedZeroOptimizer_Stage3
    overrides.guard_choice(engine_class, optimizer_class)
    overrides.explain_refusal(engine_class, optimizer_class)
    overrides.allow_bf16_masters(base_optimizer.ZeROOptimizer, optimizer_class)
    zero12 = ("bit16_groups", "single_partition_of_fp32_groups")
    access.keep_views_fresh(stage_1_and_2.DeepSpeedZeroOptimizer, *zero12, optimizer_class)
    bf16 = ("bf16_groups", "fp32_groups_flat_partition")
    access.keep_views_fresh(bf16_optimizer.BF16_Optimizer, *bf16, optimizer_class)
    universal_load.load_into_padding(
        stage_1_and_2.DeepSpeedZeroOptimizer, zero12[1], optimizer_class
    )
    universal_load.load_into_padding(bf16_optimizer.BF16_Optimizer, bf16[1], optimizer_class)
    universal_load.load_all_groups(zero3_class, optimizer_class)
    universal_load.find_places_in_round_robin(stage_1_and_2.DeepSpeedZeroOptimizer, optimizer_class)
    access.offload_codes(stage_1_and_2, optimizer_class)
    access.refuse_to_move_states(zero3_class, optimizer_class)
    unscaling.leave_to_step(stage_1_and_2.DeepSpeedZeroOptimizer, zero3_class, optimizer_class)
    narrow_grads.keep_narrow(stage_1_and_2.DeepSpeedZeroOptimizer, zero3_class, optimizer_class)
    sharing.share_in_stage3(zero3_class, optimizer_class)
    weight_copies.write_in_step(stage_1_and_2.DeepSpeedZeroOptimizer, zero3_class, optimizer_class)
    overrides.swap_states(stage3, optimizer_class)
    overrides.agree_on_swapped(engine_class, zero3_class)
    overrides.finish_steps(engine_class, optimizer_class)
    add_manifests(engine_class, optimizer_class)


def add_op(all_ops) -> None:
    """Add the op to `deepspeed.ops.op_builder.all_ops`, for ds_report and ds_build."""
    from deepspeed.ops import op_builder

    from zero8.zero.op_builder import Zero8AdamBuilder

    all_ops.ALL_OPS[Zero8AdamBuilder.NAME] = Zero8AdamBuilder()
    op_builder.Zero8AdamBuilder = Zero8AdamBuilder


def state_of(found: object | None) -> str:
    """Return the `state` of a seam, from its member."""
    if found is None:
        return "missing"
    if isinstance(found, list | dict):  # a list of classes, a table of builders
        ours = any("zero8" in repr(entry) for entry in found)
    else:
        ours = getattr(found, "__globals__", {}).get("__name__", "").startswith("zero8.")
    return "installed" if ours else "present"
