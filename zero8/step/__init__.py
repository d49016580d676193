# SPDX-License-Identifier: Apache-2.0
"""What a step needs around the kernel: kept records, CUDA graphs, counts of bad blocks."""
