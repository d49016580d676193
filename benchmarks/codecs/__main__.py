# SPDX-License-Identifier: Apache-2.0
"""`python -m benchmarks.codecs`."""

import sys

from benchmarks.codecs.command import main

if __name__ == "__main__":
    sys.exit(main())
