# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.fidelity`."""

import sys

from benchmarks.fidelity.command import main

if __name__ == "__main__":
    sys.exit(main())
