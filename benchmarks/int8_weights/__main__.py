# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.int8_weights`."""

import sys

from benchmarks.int8_weights.command import main

if __name__ == "__main__":
    sys.exit(main())
