# SPDX-License-Identifier: Apache-2.0
"""Runs the measurement."""

import sys

from benchmarks.step.command import main

sys.exit(main())
