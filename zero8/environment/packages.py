# SPDX-License-Identifier: Apache-2.0
"""Other packages: the extra of zero8 that installs each, and the versions it was tested with."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.metadata import version

from packaging.specifiers import SpecifierSet

EXTRAS = {
    "cpuinfo": "bench",
    "deepspeed": "deepspeed",
    "matplotlib": "bench",
    "torchao": "torchao",
    "transformers": "plan",
}
"""The extra of each package, by the name under which it is imported."""

FAILED = 2
"""Exit status of a command that has failed, the same as for wrong usage."""


@contextmanager
def explained(program: str) -> Iterator[None]:
    """End the process with one line instead of a traceback if an extra is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        line = f"{program}: needs {package}: pip install 'zero8[{EXTRAS[package]}]'"
        print(line, file=sys.stderr)
        raise SystemExit(FAILED) from error


TESTED = {"torch": ("2.11", "2.16"), "deepspeed": ("0.19.8", "0.20")}
"""The tested versions of each package: from the first to below the second."""


def tested(package: str) -> tuple[str, str, bool]:
    """Return the installed version of a package, the tested ones, and whether it is one of them."""
    installed, expected = version(package), ">={},<{}".format(*TESTED[package])
    return installed, expected, SpecifierSet(expected).contains(installed, prereleases=True)


@lru_cache
def warn_if_untested(package: str) -> None:
    """Warn, once, if the installed version of `package` is outside the tested range."""
    installed, expected, fits = tested(package)
    if not fits:
        warnings.warn(
            f"zero8 was tested with {package}{expected}, this is {installed}; if it fails: "
            f"pip install '{package}{expected}'",
            stacklevel=2,
        )
