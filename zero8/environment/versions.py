# SPDX-License-Identifier: Apache-2.0
"""The versions of torch and DeepSpeed that zero8 was tested with."""

import warnings
from functools import lru_cache
from importlib.metadata import version

from packaging.version import Version

TESTED = {"torch": ("2.11", "2.16"), "deepspeed": ("0.19.8", "0.20")}
"""The tested versions of each package: from the first to below the second."""


@lru_cache
def warn_if_untested(package: str) -> None:
    """Warn, once, if the installed version of `package` is outside the tested range."""
    lowest, beyond = TESTED[package]
    installed = version(package)
    if not Version(lowest) <= Version(installed) < Version(beyond):
        warnings.warn(
            f"zero8 was tested with {package} from {lowest} to below {beyond}, this is "
            f"{installed}; if it fails: pip install '{package}>={lowest},<{beyond}'",
            stacklevel=2,
        )
