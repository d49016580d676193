# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.low_bit`."""

import sys

from benchmarks.low_bit.command import main

if __name__ == "__main__":
    sys.exit(main())
