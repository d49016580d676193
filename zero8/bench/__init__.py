# SPDX-License-Identifier: Apache-2.0
"""Measurements of the optimizer: what its 8-bit states cost in fidelity and in time."""
