# SPDX-License-Identifier: Apache-2.0
"""Manifests around what DeepSpeed's engine saves and loads."""
