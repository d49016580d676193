# SPDX-License-Identifier: Apache-2.0
"""Helpers for trainers and monitors; each module imports its framework."""
