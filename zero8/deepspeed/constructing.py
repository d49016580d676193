# SPDX-License-Identifier: Apache-2.0
"""Making an engine: which one makes the optimizer, what is refused, and what `assert_active` says.

An engine makes its optimizer in `_configure_optimizer`, from the config's type or from the callable
given to `deepspeed.initialize`.  An optimizer object given to `deepspeed.initialize` exists before.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from zero8.deepspeed import claims
from zero8.deepspeed.seam import ENGINE, is_ours, of_engine, rely_on, seam
from zero8.deepspeed.settings import EngineSettings
from zero8.environment.ranks import gathered
from zero8.state.params import tied_names

_engine: ContextVar[Any] = ContextVar("engine", default=None)
_PIPELINE = "deepspeed.runtime.pipe.module:PipelineModule"


@contextmanager
def noted(engine: Any) -> Iterator[None]:
    """Note an engine while it makes its optimizer."""
    token = _engine.set(engine)
    try:
        yield
    finally:
        _engine.reset(token)


def constructing_engine() -> tuple[Any, Mapping[Tensor, str]]:
    """Return the engine that is making its optimizer in this thread, and its names of parameters.

    (None, {}) if none is.
    """
    engine = _engine.get()
    # Not DeepSpeed's debug map, which is global: the collection of an older engine empties it,
    # possibly on this rank alone.
    return engine, {} if engine is None else engine.param_names


def global_shape(p: Tensor) -> tuple[int, ...]:
    """Return the full shape of a parameter, which ZeRO-3 may have partitioned."""
    shape = getattr(p, "ds_shape", None)
    return tuple(p.shape if shape is None else shape)


def check_replaced(params: Sequence[Tensor]) -> None:
    """Raise ValueError if ZeRO has replaced parameters of an optimizer, which then takes no group.

    These are the attributes by which ZeRO 3, and 1 and 2, know their parameters.
    """
    if any(hasattr(p, "_z3_optimizer") or hasattr(p, "_hp_mapping") for p in params):
        raise ValueError(
            "add_param_group: got a group for an optimizer of ZeRO, which steps only what it "
            "partitioned in deepspeed.initialize; pass all groups there, those that train later "
            "with an lr of 0, or save a checkpoint and make a new engine"
        )


rely_on(_PIPELINE, "get_tied_weights_and_groups")


@seam(
    _PIPELINE,
    "__init__",
    "copies of a weight that is tied across stages would take different steps",
    optimizer=None,
    is_early=True,
)
def make_pipeline(original: Callable, pipeline: Any, *args: Any, **kwargs: Any) -> None:
    """Note the weights that a new pipeline ties across its stages."""
    original(pipeline, *args, **kwargs)
    across = {p for p, group in pipeline.get_tied_weights_and_groups() if group.size() > 1}
    tied_names.update((p, name) for name, p in pipeline.named_parameters() if p in across)


@seam(
    ENGINE,
    "_do_optimizer_sanity_check",
    "modes and other optimizers would step instead of ours without a word",
    "basic_optimizer",
    optimizer=None,
)
def check_choice(original: Callable, engine: Any, basic_optimizer: Any) -> Any:
    """Raise for modes and other optimizers that would step instead, and for bad settings."""
    claims.check(engine, basic_optimizer)
    if is_ours(basic_optimizer):
        if EngineSettings.of(engine._config._param_dict).step_in_forward:
            check_step_in_forward(engine._config, basic_optimizer)
        if reason := unsupported_mode(engine._config.zero_config):
            raise ValueError(f"{type(basic_optimizer).__name__} does not work with {reason}")
    return original(engine, basic_optimizer)


@seam(
    "deepspeed.runtime.base_optimizer:ZeROOptimizer",
    "_configure_master_weights",
    "bf16 master weights in host memory would need DeepSpeedCPUAdam",
    "bf16_offload_validator",
)
def configure_masters(original: Callable, zero: Any, *args: Any, **kwargs: Any) -> Any:
    """Allow bf16 master weights in host memory, which DeepSpeed's validator allows its own only."""
    return original(zero, *args, **{**kwargs, "bf16_offload_validator": None})


def unsupported_mode(zero_config: Any) -> str | None:
    """Return why a ZeRO mode cannot work with an 8-bit optimizer and what to do, or None."""
    if getattr(zero_config, "zenflow", None) is not None:
        return 'zenflow: it steps with an optimizer process of its own; remove "zenflow"'
    if zero_config.elastic_checkpoint and zero_config.stage > 0:
        return (
            "elastic_checkpoint: DeepSpeed could not load what it saves; remove it. For another "
            "number of ranks: zero8 checkpoint convert DIR OUT --to zero"
        )
    offload = zero_config.offload_optimizer
    if offload is None:
        return None
    if offload.super_offload:
        return (
            "offload_optimizer.super_offload: it steps with DeepSpeedCPUAdam in a process of its "
            "own and undoes steps, which 8-bit states do not allow; set it to false"
        )
    if offload.ratio < 1.0 and offload.device != "none":
        return (
            f"offload_optimizer.ratio {offload.ratio}: DeepSpeed steps the other part with "
            "another optimizer; set it to 1.0"
        )
    if offload.device == "nvme" and zero_config.stage < 3:
        return (
            f'offload_optimizer.device "nvme" in ZeRO stage {zero_config.stage}: DeepSpeed would '
            'keep the states in memory silently; use stage 3, or "cpu"'
        )
    if offload.device == "nvme" and offload.nvme_path is None:
        return 'offload_optimizer.device "nvme" without "nvme_path": set it to a folder on the disk'
    return None


def check_step_in_forward(ds_config: Any, optimizer: Any) -> None:
    """Raise ValueError if the steps of an engine cannot be put off to the next forward."""
    zero, reason = ds_config.zero_config, ""
    offload, offloaded_params = zero.offload_optimizer, zero.offload_param
    if zero.stage != 3 or offload is None or offload.device == "none":
        reason = (
            f"ZeRO stage {zero.stage} with offload_optimizer {offload and offload.device!r}, where "
            'no module gathers its own weights, or steps are short; expected stage 3 with "cpu" or '
            '"nvme"'
        )
    elif offloaded_params is not None and offloaded_params.device == "nvme":
        reason = 'offload_param.device "nvme", whose reads the step would disturb; expected "cpu"'
    elif any(algorithm.is_of_matrices for algorithm in optimizer.algorithms):
        reason = (
            f"{type(optimizer).__name__}, whose step exchanges matrices between ranks, as the "
            "forward does; expected another optimizer"
        )
    elif ds_config.compile_config.deepcompile:
        reason = "deepcompile, which gathers in a way of its own; expected it to be off"
    elif ds_config.torch_autocast_enabled and ds_config.torch_autocast_dtype == torch.float16:
        reason = "torch_autocast in float16, whose scaler steps; expected bfloat16"
    if reason:
        raise ValueError(f'"zero8": step_in_forward: got {reason}, or remove step_in_forward')


# --- assert_active ------------------------------------------------------------------------------


def assert_active(engine: Any) -> None:
    """Raise on all ranks unless a DeepSpeed engine steps with an optimizer of zero8.

    All ranks must call it: it is a collective.

    Args:
        engine: the result of `deepspeed.initialize` or of Accelerate's `prepare`.

    Raises:
        RuntimeError: naming the engine's optimizer, and the setting to change.
    """
    found = gathered(_problem(engine))
    if any(found):
        problem = next(filter(None, found))
        ranks = [rank for rank, text in enumerate(found) if text == problem]
        where = "" if len(ranks) == len(found) else f" (ranks {ranks} of {len(found)})"
        raise RuntimeError(f"{problem}{where}")


def _problem(engine) -> str | None:
    """Return why the engine does not step with an optimizer of zero8, None if it does."""
    if not hasattr(engine, "client_optimizer"):
        return f"assert_active: got a {type(engine).__name__}, expected a DeepSpeed engine"
    optimizer = of_engine(engine)
    if is_ours(optimizer):
        return None
    name = "no optimizer" if optimizer is None else type(optimizer).__name__
    return (
        f"the engine steps with {name}, not with an optimizer of zero8: set {claims.in_config()} "
        "in the DeepSpeed config, and make no optimizer object; for Accelerate to keep an object "
        f"under offload, set {claims.SETTING} there"
    )
