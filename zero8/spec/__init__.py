# SPDX-License-Identifier: Apache-2.0
"""The definition of a step: grid, codes, dither, arithmetic, and a reference in plain PyTorch."""
