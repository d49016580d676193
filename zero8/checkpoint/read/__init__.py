# SPDX-License-Identifier: Apache-2.0
"""Readers of all kinds of checkpoints: files are read as data, and run nothing."""
