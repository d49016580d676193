# SPDX-License-Identifier: Apache-2.0
"""Fits zero8 into DeepSpeed: checks all seams, and patches them."""

import sys
from typing import Any

from zero8.deepspeed import (  # noqa: F401 - each declares its seams
    checkpoints,
    constructing,
    gradients,
    nvme,
    states,
    step,
)

# isort: split
from zero8.deepspeed import in_forward  # noqa: F401 - the last: it waits before the others' patches
from zero8.deepspeed.seam import ENGINE, SEAMS, Seam, classes, seam
from zero8.environment.packages import warn_if_untested

_SUPPORTED = "ZERO_SUPPORTED_OPTIMIZERS"

SEAMS += [
    Seam("deepspeed.runtime.zero.utils", _SUPPORTED, (), "ZeRO would refuse ours", kind=list),
    Seam("deepspeed.ops.op_builder.all_ops", "ALL_OPS", (), "ds_report would not list our op"),
]


def fit(optimizer_class: type) -> None:
    """Have DeepSpeed take a class of ours: now, or when it makes its next engine."""
    if optimizer_class not in classes:
        classes.append(optimizer_class)
    if sys.modules.get("deepspeed"):
        install()


def install() -> None:
    """Patch the loaded DeepSpeed, once, and have it take the classes of ours that it does not yet.

    Raises RuntimeError if this DeepSpeed lacks one of the seams; nothing is patched then.
    """
    from deepspeed.runtime.zero import utils

    supported = getattr(utils, _SUPPORTED, [])
    if not set(classes) & set(supported):
        warn_if_untested("deepspeed")
        for one in SEAMS:
            one.check()
        for one in SEAMS:
            if not one.is_early:
                one.install()
    supported += [one for one in classes if one not in supported]


def install_early(_: Any) -> None:
    """Patch what the first engine calls before it makes its optimizer, which is before `install`.

    To be called when `deepspeed.runtime.engine` is imported.  Raises as `install`, which says it
    again.
    """
    early = [one for one in SEAMS if one.is_early]
    for one in early:
        one.check()
    for one in early:
        one.install()


@seam(
    ENGINE,
    "_configure_optimizer",
    "optimizers could not tell that an engine makes them",
    optimizer=None,
    is_early=True,
)
def configure_optimizer(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
    """Make an engine's optimizer, which may be the first of the process."""
    if classes:
        install()
    with constructing.noted(engine):
        return original(engine, *args, **kwargs)


def add_op(all_ops: Any) -> None:
    """Add the op to `deepspeed.ops.op_builder.all_ops`, for ds_report and ds_build."""
    from deepspeed.ops import op_builder

    from zero8.deepspeed.op_builder import Zero8AdamBuilder

    all_ops.ALL_OPS[Zero8AdamBuilder.NAME] = Zero8AdamBuilder()
    op_builder.Zero8AdamBuilder = Zero8AdamBuilder
