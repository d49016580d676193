# SPDX-License-Identifier: Apache-2.0
"""The algorithms that step on 8-bit moments: equations, scalars and options of each."""
