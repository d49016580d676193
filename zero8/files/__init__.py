# SPDX-License-Identifier: Apache-2.0
"""The files of checkpoints: manifests, tags, atomic writes, safe access."""
