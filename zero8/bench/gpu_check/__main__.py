# SPDX-License-Identifier: Apache-2.0
"""`python -m zero8.bench.gpu_check`."""

import sys

from zero8 import extras
from zero8.bench.gpu_check.command import main

if __name__ == "__main__":
    with extras.explained("python -m zero8.bench.gpu_check"):
        sys.exit(main())
