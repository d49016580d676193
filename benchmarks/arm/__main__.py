# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.arm`."""

import sys

from benchmarks.arm.command import main

if __name__ == "__main__":
    sys.exit(main())
