# SPDX-License-Identifier: Apache-2.0
"""Runs a script, or with -m a module, as launch/rank.py asks for: `python -m zero8.run SCRIPT`.

ZERO8_TIMEOUT_S is the time limit of every process group, ZERO8_SIGN_FD where signs of life go.
"""

import os
import runpy
import sys
from datetime import timedelta
from pathlib import Path

from zero8.run.limits import limit_groups
from zero8.run.signs import give_signs


def main() -> None:
    """Run what the command line names, in this process."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    name, *rest = arguments[is_module:]
    limit = timedelta(seconds=float(os.environ["ZERO8_TIMEOUT_S"]))
    groups = limit_groups(limit)
    give_signs(int(os.environ["ZERO8_SIGN_FD"]), groups)
    # As Python itself would: a script's own folder comes first, for a module this one.
    sys.argv = [name, *rest]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(name).resolve().parent)
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main()
