# SPDX-License-Identifier: Apache-2.0
"""The maps of the 8-bit optimizers paper (arXiv:2110.02861) beside `log`: `make maps`."""
