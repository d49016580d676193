# SPDX-License-Identifier: Apache-2.0
"""How far INT8 weights are from float32 ones, and what they cost a training, by rounding."""
