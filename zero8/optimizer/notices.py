# SPDX-License-Identifier: Apache-2.0
"""Logs properties of a new optimizer that users might not expect."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from zero8.environment import ranks
from zero8.state.params import ParamInfo
from zero8.state.settings import Settings
from zero8.state.tell import tell_once

FLOAT32_SHARE_TO_WARN = 0.01
"""The share of elements with float32 moments above which they are logged as a warning."""

logger = logging.getLogger("zero8")


def log_float32_shares(settings: Settings, infos: Collection[ParamInfo]) -> None:
    """Log the share of elements that keep float32 moments, and patterns that match no name."""
    names = [info.name or "" for info in infos]
    for pattern in settings.policy.patterns_without(names):
        near = settings.policy.nearest(pattern, names)
        logger.warning(
            "zero8: fp32_params: no parameter has a name that matches %r%s",
            pattern,
            f"; names like it: {', '.join(near)}" if near else "",
        )
    shares = settings.policy.float32_shares(
        (info.name, info.shape, info.why_float32) for info in infos
    )
    if not shares or ranks.rank() > 0:
        return
    whole = sum(shares.values())
    reasons = ", ".join(f"{reason}: {share:.1%}" for reason, share in shares.items())
    # Norms and biases alone, which every model has, need no warning.
    logger.log(
        logging.WARNING if whole > FLOAT32_SHARE_TO_WARN else logging.INFO,
        "zero8: %.1f %% of the elements keep float32 moments (%s): memory_report() lists them",
        100 * whole,
        reasons,
    )


def warn_of_missing_decay(options: Mapping[str, Any]) -> None:
    """Warn that weight_decay is 0 by default, whereas torch's AdamW decays."""
    if ranks.rank() == 0 and options.get("decoupled_weight_decay"):
        tell_once(
            "zero8: weight_decay is not given and is 0, where torch's AdamW has 0.01: pass "
            "weight_decay=0.01 to decay as it does, or weight_decay=0"
        )


def tell_of_l2(class_name: str, options: Mapping[str, Any]) -> None:
    """Say if a DeepSpeed config asks for Adam instead of AdamW."""
    if ranks.rank() == 0 and not options["decoupled_weight_decay"]:
        tell_once(
            f"zero8: adam_w_mode is false, so {class_name} adds the weight decay to the gradient; "
            "DeepSpeed's AdamW ignores the key.  To go on as it does, leave adam_w_mode out"
        )
