# SPDX-License-Identifier: Apache-2.0
"""What the step costs on ARM processors that are not at hand: `python -m benchmarks.arm`."""
