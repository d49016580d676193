# SPDX-License-Identifier: Apache-2.0
"""`python -m zero8.bench.gpu_check`."""

import sys

from zero8.bench.gpu_check.command import main

if __name__ == "__main__":
    sys.exit(main())
