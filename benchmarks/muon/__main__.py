# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.muon`."""

import sys

from benchmarks.muon.command import main

if __name__ == "__main__":
    sys.exit(main())
