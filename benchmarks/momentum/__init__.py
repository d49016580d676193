# SPDX-License-Identifier: Apache-2.0
"""What rounding the one moment of SGD and Lion costs: `python -m benchmarks.momentum`."""
