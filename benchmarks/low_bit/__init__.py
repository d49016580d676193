# SPDX-License-Identifier: Apache-2.0
"""What rounding does to weights and gradients of few bits: `python -m benchmarks.low_bit`."""
