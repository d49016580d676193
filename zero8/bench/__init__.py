# SPDX-License-Identifier: Apache-2.0
"""Measurements of the optimizer: times and memory of its steps."""
