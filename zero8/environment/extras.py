# SPDX-License-Identifier: Apache-2.0
"""Packages that only some commands need, and the extra of zero8 that installs each."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

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
