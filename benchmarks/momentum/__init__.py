# SPDX-License-Identifier: Apache-2.0
"""What rounding the moments of SGD, Lion and AdEMAMix costs: `python -m benchmarks.momentum`."""
