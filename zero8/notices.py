# SPDX-License-Identifier: Apache-2.0
"""What an optimizer logs when it is made, if users might not expect it."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from zero8.ranks import numbers
from zero8.state.params import ParamInfo
from zero8.state.settings import Settings
from zero8.state.tell import tell_once

FLOAT32_SHARE_TO_WARN = 0.01
"""Above this share of the elements, float32 moments are worth a warning."""

logger = logging.getLogger("zero8")


def tell_what_stays_float32(settings: Settings, infos: Collection[ParamInfo]) -> None:
    """Log which share of the elements keeps float32 moments, and patterns that match nothing."""
    names = [info.name or "" for info in infos]
    for pattern in settings.policy.patterns_without(names):
        near = settings.policy.nearest(pattern, names)
        logger.warning(
            "zero8: fp32_params: no parameter has a name that matches %r%s",
            pattern,
            f"; names like it: {', '.join(near)}" if near else "",
        )
    shares = settings.policy.float32_shares((info.name, info.shape) for info in infos)
    if not shares or numbers.rank() > 0:
        return
    whole = sum(shares.values())
    causes = ", ".join(f"{cause}: {share:.1%}" for cause, share in shares.items())
    # Norms and biases, which every model has, are no news.
    logger.log(
        logging.WARNING if whole > FLOAT32_SHARE_TO_WARN else logging.INFO,
        "zero8: %.1f %% of the elements keep float32 moments (%s): memory_report() lists them",
        100 * whole,
        causes,
    )


def tell_of_no_decay(options: Mapping[str, Any]) -> None:
    """Log that weight_decay is 0 though the AdamW of other libraries would decay."""
    if numbers.rank() == 0 and options.get("decoupled_weight_decay"):
        tell_once(
            "zero8: weight_decay is not given and is 0, where torch's AdamW has 0.01: pass "
            "weight_decay=0.01 to decay as it does, or weight_decay=0"
        )
