# SPDX-License-Identifier: Apache-2.0
"""Readers of all kinds of checkpoints, which execute nothing in them."""
