# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.momentum`."""

import sys

from benchmarks.momentum.command import main

if __name__ == "__main__":
    sys.exit(main())
