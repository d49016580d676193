# SPDX-License-Identifier: Apache-2.0
"""What a step is: grid, codes, dither, arithmetic, and the whole step in plain PyTorch."""
