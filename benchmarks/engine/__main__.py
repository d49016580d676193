# SPDX-License-Identifier: Apache-2.0
"""Runs the measurement."""

import sys

from benchmarks.engine.command import main

sys.exit(main())
