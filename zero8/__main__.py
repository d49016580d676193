# SPDX-License-Identifier: Apache-2.0
"""The command line, as `python -m zero8`."""

import sys

from zero8.cli import main

if __name__ == "__main__":
    sys.exit(main())
