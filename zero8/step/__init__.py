# SPDX-License-Identifier: Apache-2.0
"""The step around the kernel: cached records, CUDA graphs, counts of non-finite blocks."""
