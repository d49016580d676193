# SPDX-License-Identifier: Apache-2.0
"""Manifests for the checkpoints that DeepSpeed's engine saves and loads."""
