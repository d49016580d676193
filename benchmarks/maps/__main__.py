# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.maps`."""

import sys

from benchmarks.maps.command import main

if __name__ == "__main__":
    sys.exit(main())
