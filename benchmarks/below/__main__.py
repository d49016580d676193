# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.below`."""

import sys

from benchmarks.below.command import main

if __name__ == "__main__":
    sys.exit(main())
