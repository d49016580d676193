# SPDX-License-Identifier: Apache-2.0
"""Conversions between the states of zero8 and of other optimizers."""
