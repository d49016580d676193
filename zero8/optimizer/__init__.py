# SPDX-License-Identifier: Apache-2.0
"""The step around the kernel: what is kept between steps, clipping, Muon, skipped blocks."""
