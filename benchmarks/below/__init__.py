# SPDX-License-Identifier: Apache-2.0
"""Adam's states in less than two bytes per parameter: `python -m benchmarks.below`."""
